"""Request bodies: JSON of a bounded length, in UTF-8 throughout, or an error that says what is wrong with it."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json


class JsonRequest(Request):
    """A request that reads no more than the settings allow."""

    async def body(self) -> bytes:
        """Return the body; raise ``HTTPException`` 413 as soon as it is known to be too long."""
        if not hasattr(self, "_body"):
            limit = self.app.state.parts.settings.max_body_bytes
            told = self.headers.get("content-length", "0")
            if told.isdecimal() and int(told) > limit:
                raise HTTPException(413)
            body = bytearray()
            async for chunk in self.stream():
                body += chunk
                if len(body) > limit:
                    raise HTTPException(413)
            self._body = bytes(body)
        return self._body

    async def json(self) -> Any:
        """Return the value of the body; unlike the standard library's, half a surrogate pair is no text."""
        try:
            return from_json(await self.body())
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


class JsonRoute(APIRoute):
    """A route whose requests are ``JsonRequest``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the handler that FastAPI makes."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle
