"""The audit log: who did what, in the database, for as long as it is to be kept."""

import logging
from dataclasses import dataclass
from datetime import UTC, datetime

from anyio.to_thread import run_sync
from sqlalchemy import Engine, delete, insert, select
from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from packhouse.client.wire_access import AuditEntry
from packhouse.service.access import route_of
from packhouse.service.database import now
from packhouse.service.logs import bound_to
from packhouse.service.tables import AuditRow

log = logging.getLogger(__name__)

KEEP_DAYS = 365.0
TIDY_EVERY = 256
"""Entries between two times that old ones are removed."""

ACTIONS = {
    ("POST", "/v1/jobs"): "submit",
    ("DELETE", "/v1/jobs/{job_id}"): "cancel",
    ("POST", "/v1/plans"): "plan",
    ("POST", "/v1/presets"): "preset",
    ("PUT", "/v1/cache/pins/{entry_id}"): "pin",
    ("DELETE", "/v1/cache/pins/{entry_id}"): "unpin",
    ("DELETE", "/v1/cache/entries/{entry_id}"): "remove",
    ("POST", "/v1/cache/gc"): "gc",
    ("POST", "/v1/cache/rescan"): "rescan",
    ("POST", "/v1/cache/verify"): "verify",
    ("POST", "/v1/tokens"): "token-create",
    ("DELETE", "/v1/tokens/{name}"): "token-revoke",
}
"""The routes that change something, and what that is called."""


class Audit:
    """The audit log of a database. Any thread may call any method."""

    def __init__(self, engine: Engine, keep_days: float = KEEP_DAYS) -> None:
        self._engine, self._keep_days = engine, keep_days

    def note(self, actor: str, action: str, subject: str) -> None:
        """Write down that ``actor`` did something; the request's id comes from the log's context."""
        row = {
            "at": now(),
            "actor": actor,
            "action": action,
            "subject": subject[:200],
            "request": bound_to("request") or "",
        }
        with self._engine.begin() as connection:
            number = connection.scalar(insert(AuditRow).values(row).returning(AuditRow.serial))
            if number is not None and number % TIDY_EVERY == 0:
                connection.execute(delete(AuditRow).where(AuditRow.at < now() - 86_400 * self._keep_days))

    def entries(self, *, before: int | None, limit: int) -> list[AuditEntry]:
        """Return entries, newest first; with ``before``, those with a lower number. Those too old are left out."""
        row = AuditRow
        query = select(row.serial, row.at, row.actor, row.action, row.subject, row.request)
        query = query.where(row.at >= now() - 86_400 * self._keep_days).order_by(row.serial.desc()).limit(limit)
        if before is not None:
            query = query.where(row.serial < before)
        with self._engine.connect() as connection:
            return [
                AuditEntry(
                    number=number,
                    at=datetime.fromtimestamp(at, UTC),
                    actor=actor,
                    action=action,
                    subject=subject,
                    request=request,
                )
                for number, at, actor, action, subject, request in connection.execute(query)
            ]


@dataclass(frozen=True, slots=True)
class AuditedRequests:
    """Middleware that writes down what changed something, before it is answered; behind ``Access``."""

    app: ASGIApp
    audit: Audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        route = route_of(scope["method"], scope["path"]) if scope["type"] == "http" else ("", "")
        action = ACTIONS.get(route)
        if action is None:
            await self.app(scope, receive, send)
            return

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                subject = _subject(route[1], scope["path"], Headers(raw=message["headers"]))
                try:
                    await run_sync(self.audit.note, scope["state"]["caller"].name, action, subject)
                except SQLAlchemyError:  # it is done: to say now that it failed would be wrong
                    log.exception("this could not be written into the audit log: %s %s", action, subject)
            await send(message)

        await self.app(scope, receive, noting)


def _subject(route: str, path: str, answer: Headers) -> str:
    """Return the last part of the path of what was made, or of what the request was sent to."""
    where = answer.get("location") or (path if route.endswith("}") else "")
    return where.rpartition("/")[2]
