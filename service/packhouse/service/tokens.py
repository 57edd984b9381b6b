"""Access tokens: made once and shown once, kept as digests, known by a prefix, with a role, a name and perhaps an end.

A token is ``ph_`` with an id of 8 hexadecimal digits, ``_``, and 256 random bits. Only the SHA-256 of the bits is kept:
they cannot be guessed, so a slow hash would add nothing. Once a token was made the service is closed for good, also
when all of them have been revoked or have ended.
"""

import hashlib
import hmac
import re
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from secrets import token_hex, token_urlsafe

from sqlalchemy import Engine, insert, select, update
from sqlalchemy.exc import IntegrityError

from packhouse.client.errors import InvalidRequest, NotFound
from packhouse.client.wire_access import Token
from packhouse.service.database import now
from packhouse.service.tables import TokenRow

FRESH = 1.0
"""Seconds for which what the database says of tokens is believed: a token revoked elsewhere ends that much later."""

_TOKEN = re.compile(r"ph_([0-9a-f]{8})_([A-Za-z0-9_-]{43})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_NOBODY = b"\0" * 32


class Role(IntEnum):
    """What a caller may do; each role may do what those before it may."""

    READ = 1
    SUBMIT = 2
    ADMIN = 3

    @property
    def word(self) -> str:
        """The role as it is written."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what they may do."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class _Known:
    caller: Caller
    digest: bytes
    expires_at: float | None
    """By the database's clock, which is UTC."""


class Tokens:
    """The tokens of a database. Any thread may call any method."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}
        self._any = False
        self._read_at = -FRESH

    def create(self, name: str, role: Role, lifetime: float | None = None) -> tuple[Token, str]:
        """Make a token that lives for ``lifetime`` seconds, or until it is revoked; return it, and what is shown once.

        Raises ``InvalidRequest`` for a name that is taken or cannot be one.
        """
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"{name[:80]!r} cannot name a token", "use up to 64 letters, digits, dots, dashes, underscores and @"
            )
        secret, token_id = token_urlsafe(32), token_hex(4)
        row = {
            "id": token_id,
            "name": name,
            "role": role.word,
            "digest": _digest(secret).hex(),
            "created_at": now(),
            "expires_at": None if lifetime is None else now() + lifetime,
        }
        try:
            with self._engine.begin() as connection:
                connection.execute(insert(TokenRow).values(row))
        except IntegrityError:
            raise InvalidRequest(f"there is a token {name!r}", "revoke it first, or take another name") from None
        self._read_at = -FRESH
        return self._one(token_id), f"ph_{token_id}_{secret}"

    def revoke(self, name: str) -> Token:
        """End the token of a name, or of an id; raise ``NotFound`` if there is none that lives."""
        alive = (TokenRow.revoked_at.is_(None), (TokenRow.name == name) | (TokenRow.id == name))
        with self._engine.begin() as connection:
            token_id = connection.scalar(select(TokenRow.id).where(*alive))
            if token_id is None:
                raise NotFound(f"there is no token {name[:80]!r} that lives", "'packhouse token ls' lists them")
            connection.execute(update(TokenRow).where(TokenRow.id == token_id).values(revoked_at=now()))
        self._read_at = -FRESH
        return self._one(token_id)

    def all(self) -> list[Token]:
        """Return all tokens that were ever made, oldest first."""
        row = TokenRow
        columns = (row.id, row.name, row.role, row.created_at, row.expires_at, row.revoked_at)
        with self._engine.connect() as connection:
            return [_told(*values) for values in connection.execute(select(*columns).order_by(row.serial))]

    def closed(self) -> bool:
        """Whether a token was ever made, so that each caller needs one."""
        self._refresh()
        return self._any

    def usable(self) -> bool:
        """Whether there is a token that a caller could have."""
        self._refresh()
        return any(_lives(known) for known in self._known.values())

    def caller(self, token: str) -> Caller | None:
        """Return who has this token, or None for what is none, was revoked or has ended.

        It takes as long for a wrong secret as for a right one.
        """
        self._refresh()
        found = _TOKEN.fullmatch(token)
        if found is None:
            return None
        known = self._known.get(found[1])
        right = hmac.compare_digest(_digest(found[2]), _NOBODY if known is None else known.digest)
        return known.caller if known is not None and right and _lives(known) else None

    def _refresh(self) -> None:
        with self._lock:
            if time.monotonic() - self._read_at < FRESH:
                return
            row = TokenRow
            columns = (row.id, row.name, row.role, row.digest, row.expires_at, row.revoked_at)
            read_at = time.monotonic()
            with self._engine.connect() as connection:
                rows = connection.execute(select(*columns)).all()
            self._any = bool(rows)
            self._known = {
                token_id: _Known(Caller(name, Role[role.upper()]), bytes.fromhex(digest), expires_at)
                for token_id, name, role, digest, expires_at, revoked_at in rows
                if revoked_at is None
            }
            self._read_at = read_at

    def _one(self, token_id: str) -> Token:
        return next(token for token in self.all() if token.id == token_id)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _lives(known: _Known) -> bool:
    return known.expires_at is None or time.time() < known.expires_at


def _told(
    token_id: str, name: str, role: str, created_at: float, expires_at: float | None, revoked_at: float | None
) -> Token:
    return Token.model_validate(
        {
            "id": token_id,
            "name": name,
            "role": role,
            "created_at": _time(created_at),
            "expires_at": _time(expires_at),
            "revoked_at": _time(revoked_at),
        }
    )


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
