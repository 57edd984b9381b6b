"""The HTTP connection to a service: problem documents and broken connections become the client's errors."""

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any, TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from packhouse.client.errors import Damaged, Evicted, InvalidRequest, Mismatch, NotFound, PackhouseError, Unavailable
from packhouse.client.settings import access_token, ca_file, service_url
from packhouse.client.wire import Problem

T = TypeVar("T")

_KINDS: dict[str, type[PackhouseError]] = {
    error.kind: error for error in (InvalidRequest, NotFound, Evicted, Damaged, Mismatch, Unavailable)
}


def to_error(problem: Problem) -> PackhouseError:
    """Return the error that a problem document tells of; one of a kind unknown here keeps its kind and status."""
    kind = problem.type.rpartition(":")[2]
    error = _KINDS.get(kind, PackhouseError)(problem.detail, problem.remedy)
    error.kind, error.status = kind, problem.status
    return error


class Connection:
    """Connections to one service, opened when needed. It can be pickled, and used after a fork."""

    def __init__(
        self, url: str | None, transport: httpx.BaseTransport | None, timeout: float, token: str | None = None
    ) -> None:
        self.url = (url or service_url()).rstrip("/")
        self.timeout = timeout
        self._transport = transport
        self._token = token
        self._clients: dict[int, httpx.Client] = {}
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL:
            parsed = httpx.URL("")
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise InvalidRequest(f"{self.url!r} is not the URL of a service", "use one like http://127.0.0.1:7077")
        # A proxy that is set for the internet does not know this machine's loopback.
        self._proxied = not _is_loopback(parsed.host)

    def __reduce__(self) -> tuple[Any, ...]:
        return Connection, (self.url, self._transport, self.timeout, self._token)

    def close(self) -> None:
        """Close what this process opened; the next request opens it again."""
        if client := self._clients.pop(os.getpid(), None):
            client.close()

    def send(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Return the answer to a request, read whole; raise what a problem document says, or ``Unavailable``."""
        with self._errors():
            response = self._client.request(method, path, **request)
        check(response)
        return response

    @contextmanager
    def stream(self, method: str, path: str, **request: Any) -> Iterator[httpx.Response]:
        """Open the answer to a request, to be read in pieces; raise as ``send`` does, also while it is read."""
        with self._errors(), self._client.stream(method, path, **request) as response:
            if not response.is_success:
                response.read()
                check(response)
            yield response

    def ask(self, model: type[T] | TypeAdapter[T], method: str, path: str, **request: Any) -> T:
        """Return the answer as a ``model``; raise as ``send`` does, or ``Mismatch`` for an answer of another shape."""
        return parse(model, self.send(method, path, **request).content)

    @property
    def _client(self) -> httpx.Client:
        # A socket that two processes share mixes up their answers: each has its own.
        client = self._clients.get(os.getpid())
        if client is None:
            token = self._token or access_token()
            client = httpx.Client(
                base_url=self.url,
                headers={} if token is None else {"authorization": f"Bearer {token}"},
                transport=self._transport,
                timeout=self.timeout,
                trust_env=self._proxied,
                verify=_trusted(),
                follow_redirects=False,  # the token is for this service alone
            )
            self._clients[os.getpid()] = client
        return client

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            remedy = "start one with 'packhouse serve', or set PACKHOUSE_URL"
            raise Unavailable(f"no service at {self.url}", remedy) from error
        except httpx.TimeoutException as error:
            fact = f"the service at {self.url} did not answer within {self.timeout:g} s"
            raise Unavailable(fact, "try again, or see its /readyz and log") from error
        except httpx.TransportError as error:
            raise Unavailable(f"the connection to {self.url} broke ({error})", "try again") from error


def check(response: httpx.Response) -> None:
    """Raise the error that ``response`` tells of, if any."""
    if response.has_redirect_location:
        fact = f"{response.url} answered {response.status_code} and leads elsewhere"
        raise PackhouseError(fact, "set PACKHOUSE_URL to where the service itself is: a token is sent nowhere else")
    if not response.is_error:
        return
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        gateway = response.status_code in (502, 503, 504)
        fact = f"{response.url} answered {response.status_code} without saying why"
        error = (Unavailable if gateway else PackhouseError)(fact, "check that a packhouse service listens there")
        error.status = response.status_code
        raise error from None
    raise to_error(problem)


def parse(model: type[T] | TypeAdapter[T], data: str | bytes) -> T:
    """Read JSON as a ``model``; raise ``Mismatch``."""
    adapter = model if isinstance(model, TypeAdapter) else TypeAdapter(model)
    try:
        return adapter.validate_json(data)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        fact = f"the service's answer cannot be read ({where}: {error.errors()[0]['msg']})"
        raise Mismatch(fact, "use a client and a service of one version") from error


def _trusted() -> ssl.SSLContext | bool:
    file = ca_file()
    try:
        return True if file is None else ssl.create_default_context(cafile=file)
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(f"SSL_CERT_FILE is {file!r}, which cannot be used ({error})", "name a PEM file") from None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def segment(text: str) -> str:
    """Return ``text`` if it can stand in a path; an id never holds anything else."""
    if not text.isalnum() or not text.isascii():
        raise NotFound(f"{text!r} is not an id", "ids are letters and digits")
    return text
