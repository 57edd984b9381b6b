"""Access: who asks, whether they may, and whether their browser was told to by a page of someone else.

It stands before all routes and reads no body. A path that no route is known for here needs the highest role.
"""

import logging
import re
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Annotated
from urllib.parse import quote, urlsplit

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Depends, Request, Response
from fastapi.responses import RedirectResponse
from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from packhouse.client.errors import PackhouseError
from packhouse.service import problems
from packhouse.service.dashboard.render import error_page
from packhouse.service.logs import bound
from packhouse.service.tokens import Caller, Role, Tokens

log = logging.getLogger(__name__)

COOKIE = "packhouse_token"
ANYONE = Caller("anyone", Role.ADMIN)
"""Who asks where no token is needed: the service listens on loopback, and none was ever made."""
NOBODY = Caller("nobody", Role.READ)
"""Who asks for what is open to all."""

LEAST: dict[tuple[str, str], Role | None] = {
    ("GET", "/livez"): None,
    ("GET", "/readyz"): None,
    ("GET", "/login"): None,
    ("POST", "/login"): None,
    ("POST", "/logout"): None,
    ("GET", "/static/{name}"): None,
    ("GET", "/metrics"): Role.READ,
    ("GET", "/openapi.json"): Role.READ,
    ("GET", "/v1/whoami"): Role.READ,
    # What follows from datasets and plans that are there.
    ("GET", "/v1/jobs"): Role.READ,
    ("GET", "/v1/jobs/{job_id}"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/events"): Role.READ,
    ("GET", "/v1/jobs/{job_id}/rejected"): Role.READ,
    ("GET", "/v1/datasets"): Role.READ,
    ("GET", "/v1/datasets/{dataset_id}"): Role.READ,
    ("GET", "/v1/datasets/{dataset_id}/manifest"): Role.READ,
    ("GET", "/v1/datasets/{dataset_id}/meta"): Role.READ,
    ("GET", "/v1/plans"): Role.READ,
    ("GET", "/v1/plans/{plan_id}"): Role.READ,
    ("GET", "/v1/plans/{plan_id}/report"): Role.READ,
    ("GET", "/v1/plans/{plan_id}/steps"): Role.READ,
    ("GET", "/v1/shards/{key}"): Role.READ,
    ("GET", "/v1/shards/{key}/meta"): Role.READ,
    ("GET", "/v1/cache"): Role.READ,
    ("GET", "/v1/cache/entries"): Role.READ,
    ("POST", "/v1/cache/uses"): Role.READ,
    # What reads sources, or takes the workers' time.
    ("POST", "/v1/jobs"): Role.SUBMIT,
    ("DELETE", "/v1/jobs/{job_id}"): Role.SUBMIT,
    ("POST", "/v1/preview"): Role.SUBMIT,
    ("POST", "/v1/cache/explain"): Role.SUBMIT,
    ("POST", "/v1/plans"): Role.SUBMIT,
    ("POST", "/v1/presets"): Role.SUBMIT,
    ("PUT", "/v1/cache/pins/{entry_id}"): Role.SUBMIT,
    ("DELETE", "/v1/cache/pins/{entry_id}"): Role.SUBMIT,
    # What removes things, and what is told of people.
    ("DELETE", "/v1/cache/entries/{entry_id}"): Role.ADMIN,
    ("POST", "/v1/cache/gc"): Role.ADMIN,
    ("POST", "/v1/cache/rescan"): Role.ADMIN,
    ("POST", "/v1/cache/verify"): Role.ADMIN,
    ("GET", "/v1/tokens"): Role.ADMIN,
    ("POST", "/v1/tokens"): Role.ADMIN,
    ("DELETE", "/v1/tokens/{name}"): Role.ADMIN,
    ("GET", "/v1/audit"): Role.ADMIN,
    # The dashboard.
    ("GET", "/"): Role.READ,
    ("GET", "/jobs"): Role.READ,
    ("GET", "/jobs/{job_id}"): Role.READ,
    ("GET", "/live/jobs"): Role.READ,
    ("GET", "/live/jobs/{job_id}"): Role.READ,
    ("GET", "/datasets"): Role.READ,
    ("GET", "/datasets/{dataset_id}"): Role.READ,
    ("GET", "/plans"): Role.READ,
    ("GET", "/plans/{plan_id}"): Role.READ,
    ("GET", "/store"): Role.READ,
    ("GET", "/preview"): Role.READ,
    ("POST", "/preview"): Role.SUBMIT,
}
"""The least role of every route; None where no token is asked for. HEAD is as GET."""

_PATTERNS: list[tuple[str, re.Pattern[str], str]] = [(one, compile_path(path)[0], path) for one, path in LEAST]


class Unauthorized(PackhouseError):
    """It is not known who asks."""

    kind = "unauthorized"
    status = 401


class Forbidden(PackhouseError):
    """Who asks may not do this."""

    kind = "forbidden"
    status = 403


def route_of(method: str, path: str) -> tuple[str, str]:
    """Return the key of ``LEAST`` that a request is for, or one that is not in it."""
    method = "GET" if method == "HEAD" else method
    return method, next((route for one, pattern, route in _PATTERNS if one == method and pattern.match(path)), "")


@dataclass(frozen=True, slots=True)
class Access:
    """Middleware that lets a request through, or answers it with why not."""

    app: ASGIApp
    tokens: Tokens
    always: bool = field(default=False)
    """Whether tokens are asked for although none was made yet: the service listens to other machines."""
    _threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(8))
    """Those of the routes may all be busy."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            caller = await self._admit(scope["method"], scope["path"], Headers(scope=scope))
        except PackhouseError as error:
            await _refusal(error, scope)(scope, receive, send)
            return
        except SQLAlchemyError as error:
            await problems.respond(problems.describe(problems.database_trouble(error)))(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller
        with bound(**({} if caller in (ANYONE, NOBODY) else {"caller": caller.name})):
            await self.app(scope, receive, send)

    async def _admit(self, method: str, path: str, headers: Headers) -> Caller:
        """Return who asks; raise ``Unauthorized`` or ``Forbidden``."""
        least = LEAST.get(route_of(method, path), Role.ADMIN)
        if not _bearer(headers) and method not in ("GET", "HEAD", "OPTIONS"):
            _check_same_site(headers)
        if least is None:
            return NOBODY  # without the database: whether the process lives is told in any case
        return await run_sync(self._caller, least, headers, limiter=self._threads)

    def _caller(self, least: Role, headers: Headers) -> Caller:
        if not (self.always or self.tokens.closed()):
            _check_loopback(headers)
            return ANYONE
        given = _bearer(headers) or _cookie(headers)
        if not given:
            raise Unauthorized(
                "this service asks for an access token, and the request has none",
                "set PACKHOUSE_TOKEN, or send 'authorization: Bearer TOKEN'; 'packhouse token create' makes one",
            )
        caller = self.tokens.caller(given)
        if caller is None:
            # Which of the three it is helps who guesses more than who asks.
            raise Unauthorized(
                "the access token is not known, was revoked or has ended", "ask for a new one, and set PACKHOUSE_TOKEN"
            )
        if caller.role < least:
            raise Forbidden(
                f"the token {caller.name!r} may {caller.role.word}, and this needs {least.word}",
                f"use a token with the role {least.word}",
            )
        return caller


def _bearer(headers: Headers) -> str:
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def _cookie(headers: Headers) -> str:
    # A browser sends the cookies of every program of this host, and the standard library stops at the first odd one.
    return cookie_parser(headers.get("cookie", "")).get(COOKIE, "")


def _check_same_site(headers: Headers) -> None:
    """Raise ``Forbidden`` where a browser says that another site's page makes it ask; programs say nothing of it."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
    foreign = origin is not None and urlsplit(origin).netloc != headers.get("host", "")
    if site not in ("same-origin", "none") or (foreign and "sec-fetch-site" not in headers):
        raise Forbidden("the request was sent from a page of another site", "use the pages of this service")
    if _cookie(headers) and origin is None and "sec-fetch-site" not in headers:
        raise Forbidden("a cookie came without the page that it was sent from", "send the token as a bearer instead")


def _check_loopback(headers: Headers) -> None:
    """Raise ``Forbidden`` where a page of another site has had its name lead to this machine."""
    host = urlsplit("//" + headers.get("host", "")).hostname or ""
    try:
        local = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise Forbidden(
            f"without access tokens the service answers to this machine's own names only, not to {host[:80]!r}",
            "use 127.0.0.1 or localhost, or make a token: 'packhouse token create NAME --role admin'",
        )


def _refusal(error: PackhouseError, scope: Scope) -> Response:
    """Return the answer that tells of an error; a browser gets a page, or is led to where a token is asked for."""
    if "text/html" in Headers(scope=scope).get("accept", ""):
        if error.status != 401:
            return error_page(error)
        onward = "?next=" + quote(scope["path"]) if scope["method"] == "GET" else ""
        return RedirectResponse("/login" + onward, 303, {"cache-control": "no-store"})
    more = {"www-authenticate": 'Bearer realm="packhouse"'} if error.status == 401 else {}
    return problems.respond(problems.describe(error), more)


def _caller(request: Request) -> Caller:
    caller = request.state.caller
    assert isinstance(caller, Caller)
    return caller


Asking = Annotated[Caller, Depends(_caller)]
"""A route's parameter that receives who asks."""
