"""Parameters that routes share: ids, paging, and the refusal of what nobody asked for."""

import re
from typing import Annotated

from fastapi import Depends, Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, Field

from packhouse.client.errors import NotFound
from packhouse.client.wire import Wire

_DIGEST = re.compile(r"[0-9a-f]{32}")


def _content_id(value: str) -> str:
    """Let nothing but a digest become part of a store key."""
    if not _DIGEST.fullmatch(value):
        raise NotFound(f"there is nothing under {value[:80]!r}", "an id is 32 hexadecimal digits")
    return value


ContentId = Annotated[str, AfterValidator(_content_id)]
"""Id of a dataset, plan or shard in a path."""


class Page(Wire):
    """A page of a list that is addressed by position."""

    offset: Annotated[int, Field(ge=0, lt=2**63)] = 0
    limit: Annotated[int, Field(ge=1, le=10_000)] = 1000


class Cursor(Wire):
    """A page of a list that is addressed by the last id of the page before."""

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


Paged = Annotated[Page, Query()]
FromCursor = Annotated[Cursor, Query()]


def _no_query(request: Request) -> None:
    if unknown := list(request.query_params):
        fault = {"type": "extra_forbidden", "msg": "Extra inputs are not permitted"}
        raise RequestValidationError([{**fault, "loc": ("query", name), "input": name} for name in unknown])


NO_QUERY = Depends(_no_query)
"""Dependency of a route that takes no query parameters."""


def next_page(request: Request, **changes: str | int) -> dict[str, str]:
    """Return the Link header that leads to the page with these query parameters."""
    query = request.url.include_query_params(**changes).query
    return {"link": f'<{request.url.path}?{query}>; rel="next"'}
