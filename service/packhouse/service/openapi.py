"""The OpenAPI document: what each route answers with, the problem documents of its refusals included."""

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI

from packhouse.client.wire import Problem, Wire
from packhouse.service.problems import MEDIA_TYPE

Responses = dict[int | str, dict[str, Any]]

ANY = (401, 403, 422, 503)
"""Refusals that every route knows: no token, one of a lower role, an odd query, a part that does not answer."""


def told(*statuses: int) -> Responses:
    """Return that a route may refuse with problem documents of these statuses."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


def gives(*media_types: str, status: int = 200, empty: tuple[int, ...] = ()) -> Responses:
    """Return that a route's body is of one of these types, and that the statuses ``empty`` come without a body."""
    content: dict[str, Any] = {one: {} for one in media_types}
    bodies: Responses = {status: {"description": HTTPStatus(status).phrase, "content": content}}
    return bodies | {one: {"description": HTTPStatus(one).phrase} for one in empty}


def also(status: int, model: type[Wire], when: str) -> Responses:
    """Return that a route answers with ``model`` under another status too, and when."""
    return {status: {"description": when, "model": model}}


def install(app: FastAPI) -> None:
    """Add the schema of problem documents to the document of ``app``, whose routes refer to it."""
    described = app.openapi

    def document() -> dict[str, Any]:
        made = described()
        made["components"]["schemas"].setdefault("Problem", Problem.model_json_schema())
        return made

    app.openapi = document  # type: ignore[method-assign]
