"""Problem documents (RFC 9457): every error of the service says the fact, the value and the remedy."""

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from sqlalchemy.exc import DBAPIError
from starlette.exceptions import HTTPException

from packhouse.client.errors import PackhouseError, Unavailable
from packhouse.client.wire import Problem

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:packhouse:problem:"

log = logging.getLogger(__name__)

_REMEDIES = {
    404: "GET /openapi.json lists the paths",
    405: "use a method that the Allow header names",
    413: "send a shorter body: name folders or globs rather than single files",
}

_RETRY_AFTER = {429: 30, 503: 2}
"""Seconds, by status."""


class Conflict(PackhouseError):
    """The thing is no longer in a state in which this can be done to it."""

    kind = "conflict"
    status = 409


def describe(error: PackhouseError) -> Problem:
    """Return the document of a known error."""
    return _problem(error.kind, error.status, error.detail, error.remedy)


def unexpected(trace: str) -> Problem:
    """Return the document of an error nobody foresaw; ``trace`` finds it in the log, and says nothing else."""
    return _problem(
        "internal",
        500,
        f"the service met an error it does not know (trace {trace})",
        "look for the trace in the service's log and report what stands there",
    )


def install(app: FastAPI) -> None:
    """Make ``app`` answer every error with a problem document."""
    app.add_exception_handler(PackhouseError, _on_known)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(DBAPIError, _on_database)
    app.add_exception_handler(Exception, _on_unexpected)


def respond(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """Return the HTTP answer that carries ``problem``."""
    body = problem.model_dump(mode="json")
    return JSONResponse(body, problem.status, dict(headers or {}), media_type=MEDIA_TYPE)


def _problem(kind: str, status: int, detail: str, remedy: str, **more: Any) -> Problem:
    title = kind.replace("-", " ").capitalize()
    fields = {"title": title, "status": status, "detail": detail, "remedy": remedy}
    return Problem.model_validate({"type": TYPE_PREFIX + kind, **fields, **more})


async def _on_known(request: Request, error: Exception) -> Response:
    assert isinstance(error, PackhouseError)
    seconds = _RETRY_AFTER.get(error.status)
    return respond(describe(error), None if seconds is None else {"retry-after": str(seconds)})


def database_trouble(error: Exception) -> Unavailable:
    """Return what to tell of a failed statement: the database's own reason, and nothing of the statement."""
    reason = getattr(error, "orig", None) or type(error).__name__
    remedy = "see that it runs and that its disk is not full, then try again"
    return Unavailable(f"the service's database cannot be used ({reason})", remedy)


async def _on_database(request: Request, error: Exception) -> Response:
    log.error("the database cannot be used", exc_info=error)
    return respond(describe(database_trouble(error)))


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = [_fault(item) for item in error.errors()]
    detail = "; ".join(f"{fault['field']}: {fault['fact']}{_got(fault['value'])}" for fault in faults[:5])
    if len(faults) > 5:
        detail += f"; and {len(faults) - 5} more"
    remedy = "correct these fields; GET /openapi.json has the schema"
    return respond(_problem("invalid-request", 422, detail, remedy, errors=faults))


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kinds = {404: "not-found", 405: "method-not-allowed", 413: "too-large"}
    facts = {
        404: f"there is nothing at {request.url.path}",
        405: f"{request.url.path} does not take {request.method}",
        413: f"the request body is longer than {request.app.state.parts.settings.max_body_bytes:,} bytes",
    }
    fact = facts.get(error.status_code, str(error.detail))
    remedy = _REMEDIES.get(error.status_code, "GET /openapi.json has the schema")
    return respond(_problem(kinds.get(error.status_code, "error"), error.status_code, fact, remedy), error.headers)


async def _on_unexpected(request: Request, error: Exception) -> Response:
    trace = request.state.request_id
    log.error("trace %s: %s %s failed as the next entry says", trace, request.method, request.url.path)
    return respond(unexpected(trace), {"x-request-id": trace})


def _fault(item: dict[str, Any]) -> dict[str, str]:
    """Return field, fact and value of one validation error, all as short text: the value may be NaN or huge."""
    where, *path = item["loc"]
    if item["type"] == "json_invalid":
        return {"field": where, "fact": f"it is not JSON in UTF-8: {item['ctx']['error']}", "value": ""}
    if isinstance(item.get("input"), bytes):
        return {"field": where, "fact": "it must come with 'content-type: application/json'", "value": ""}
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return {"field": where + field, "fact": item["msg"], "value": _short(item.get("input"))}


def _got(value: str) -> str:
    return f" (got {value})" if value else ""


def _short(value: Any, limit: int = 120) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    try:
        text = json.dumps(value, default=repr)
    except (ValueError, TypeError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 1] + "…"
