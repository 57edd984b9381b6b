"""A real S3 server on loopback: a process of its own that the tests start, and that fails when it is told to.

Run as a program it serves; ``S3Server`` is what the tests hold.
"""

import json
import logging
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

CONTROL = "/_control"
"""Path that tells the server how to fail, and answers with what it was asked since it was told last."""

PAGE = 10
"""Objects of a page of a list; S3 has 1000."""

Start = Callable[..., Any]


@dataclass(frozen=True)
class S3Server:
    """The running server."""

    port: int

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def uri(self, bucket: str, prefix: str = "") -> str:
        """Make the bucket, and return the URI of ``prefix`` in it, with keys and address, as pyarrow takes it."""
        httpx.put(f"{self.url}/{bucket}", headers=_SIGNED).raise_for_status()
        where = f"{bucket}/{prefix}".rstrip("/")
        return f"s3://test:test@{where}?scheme=http&endpoint_override=127.0.0.1:{self.port}&region=us-east-1"

    def client(self) -> Any:
        """Return a boto3 client."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )

    def fail(
        self,
        status: int,
        times: int = 1,
        *,
        method: str = "",
        contains: str = "",
        skip: int = 0,
        seconds: float = 0,
    ) -> None:
        """Answer ``times`` requests of ``method`` on paths with ``contains`` with ``status`` after a pause.

        The first ``skip`` of them are answered rightly. A status of 0 lets them through after the pause.
        """
        rule = {"status": status, "times": times, "method": method, "contains": contains}
        rule |= {"skip": skip, "seconds": seconds}
        httpx.post(self.url + CONTROL, json=rule).raise_for_status()

    def asked(self) -> Counter[str]:
        """Return how many requests came by method since the last ``fail``."""
        return Counter(httpx.get(self.url + CONTROL).json())


_SIGNED = {"authorization": "AWS4-HMAC-SHA256 Credential=test/20250101/us-east-1/s3/aws4_request"}


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run a server on a free port until the context ends."""
    process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        server = S3Server(int(process.stdout.readline()))
        yield server
    finally:
        process.kill()
        process.communicate()


class Faulty:
    """The server's WSGI application, which fails first where it was told to."""

    def __init__(self, application: Callable[[dict[str, Any], Start], Iterable[bytes]]) -> None:
        self.application = application
        self.rule: dict[str, Any] = {"times": 0}
        self.asked: Counter[str] = Counter()

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if path == CONTROL:
            answer = json.dumps(self.asked).encode()
            if method == "POST":
                self.rule = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
                self.asked.clear()
            start("200 OK", [("content-type", "application/json"), ("content-length", str(len(answer)))])
            return [answer]
        self.asked[method] += 1
        environ["QUERY_STRING"] = environ["QUERY_STRING"].replace("max-keys=1000", f"max-keys={PAGE}")
        rule = self.rule
        if rule["times"] > 0 and rule["method"] in ("", method) and rule["contains"] in path:
            rule["skip"] -= 1
            if rule["skip"] >= 0:
                return self.application(environ, start)
            rule["times"] -= 1
            time.sleep(rule["seconds"])
            if rule["status"]:
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start(f"{rule['status']} Told to", [("content-length", "0")])
                return [b""]
        return self.application(environ, start)


def _serve() -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, Faulty(application), threaded=True)
    print(server.port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve()
