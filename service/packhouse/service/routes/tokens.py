"""Routes of access: tokens, and the record of who did what."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from packhouse.client.wire import Wire
from packhouse.client.wire_access import AuditEntry, NewToken, Token, TokenSpec, WhoAmI
from packhouse.service.access import Asking
from packhouse.service.json_body import JsonRoute
from packhouse.service.openapi import told
from packhouse.service.parts import Given
from packhouse.service.routes.params import NO_QUERY, next_page
from packhouse.service.tokens import Role

router = APIRouter(prefix="/v1", tags=["access"], route_class=JsonRoute)

DAY = 86_400


class AuditQuery(Wire):
    """Which entries to list, newest first."""

    after: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Number of the last entry of the page before."""
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


Asked = Annotated[AuditQuery, Query()]


@router.get("/whoami", dependencies=[NO_QUERY])
def whoami(caller: Asking) -> WhoAmI:
    """Say who asks, and what they may do."""
    return WhoAmI.model_validate({"name": caller.name, "role": caller.role.word})


@router.get("/tokens", dependencies=[NO_QUERY])
def index(parts: Given) -> list[Token]:
    """List all tokens that were ever made, oldest first; never what is secret of them."""
    return parts.tokens.all()


@router.post("/tokens", status_code=201, dependencies=[NO_QUERY], responses=told(413))
def create(spec: TokenSpec, parts: Given, response: Response) -> NewToken:
    """Make a token. Its secret is in this answer, and nowhere else."""
    lifetime = None if spec.expires_days is None else spec.expires_days * DAY
    token, secret = parts.tokens.create(spec.name, Role[spec.role.upper()], lifetime)
    response.headers.update({"location": f"/v1/tokens/{token.name}", "cache-control": "no-store"})
    return NewToken(token=token, secret=secret)


@router.delete("/tokens/{name}", dependencies=[NO_QUERY], responses=told(404))
def revoke(name: str, parts: Given) -> Token:
    """End a token, by its name or id."""
    return parts.tokens.revoke(name)


@router.get("/audit")
def audit(query: Asked, parts: Given, request: Request, response: Response) -> list[AuditEntry]:
    """List who did what, newest first; the Link header leads to older entries."""
    entries = parts.audit.entries(before=query.after, limit=query.limit)
    if len(entries) == query.limit:
        response.headers.update(next_page(request, after=entries[-1].number))
    return entries
