"""Every request, watched: it gets an id for the log and the answer, and is timed and counted by its route."""

import logging
import re
import time
from secrets import token_hex

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from packhouse.service.logs import bound
from packhouse.service.metrics import Metrics

HEADER = "x-request-id"

log = logging.getLogger(__name__)

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class WatchedRequests:
    """Middleware; a request that brings a plain id of up to 64 characters keeps it."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request = _Request(scope, send, self._metrics, given if _ID.fullmatch(given) else token_hex(8))
        scope.setdefault("state", {})["request_id"] = request.id  # for who answers after this has ended
        with bound(request=request.id), self._metrics.http_open.track_inprogress():
            try:
                await self._app(scope, receive, request.send)
            finally:
                request.end()


class _Request:
    """A request while it is answered."""

    def __init__(self, scope: Scope, send: Send, metrics: Metrics, id: str) -> None:
        self.id = id
        self._scope, self._send, self._metrics = scope, send, metrics
        self._begun = time.perf_counter()
        self._answered = False
        self._bytes = 0

    async def send(self, message: Message) -> None:
        """Send a part of the answer."""
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[HEADER] = self.id
            self._answer(message["status"])
        self._bytes += len(message.get("body", b""))
        await self._send(message)

    def end(self) -> None:
        """Count what was sent; an answer that never began will be one of status 500."""
        if not self._answered:
            self._answer(500)
        self._metrics.http_bytes.labels(self._route()).inc(self._bytes)

    def _answer(self, status: int) -> None:
        self._answered = True
        seconds = time.perf_counter() - self._begun
        method = self._scope["method"] if self._scope["method"] in _METHODS else "other"
        self._metrics.http.labels(method, self._route(), f"{status // 100}xx").observe(seconds)
        log.debug("%s %s: %d after %.1f ms", method, self._route(), status, seconds * 1e3)

    def _route(self) -> str:
        """Return the route's template, which has no part of the path in it."""
        return getattr(self._scope.get("route"), "path", "unmatched")
