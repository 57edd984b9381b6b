"""REST models of access: tokens, and the record of who did what."""

import re
from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from packhouse.client.errors import InvalidRequest
from packhouse.client.wire import Wire

RoleName = Literal["read", "submit", "admin"]
"""read: look at everything, and stream; submit: jobs and plans too; admin: also tokens, and what removes things."""

_UNITS = {"h": 3600, "d": 86_400, "w": 7 * 86_400}


class TokenSpec(Wire):
    """A request for a token."""

    name: str
    """Of whoever will have it: 1 to 64 letters, digits, dots, dashes, underscores and @."""
    role: RoleName
    expires_days: Annotated[float, Field(gt=0, le=36_500)] | None = None


class Token(Wire):
    """A token as the service tells it: never the secret itself."""

    id: str
    """The part of the token behind ``ph_``, by which it can be recognised."""
    name: str
    role: RoleName
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None


class NewToken(Wire):
    """A token that was made just now."""

    token: Token
    secret: str
    """The whole token, which is not shown again."""


class WhoAmI(Wire):
    """Who asks, as the service knows them."""

    name: str
    role: RoleName


class AuditEntry(Wire):
    """Something that someone did."""

    number: int
    at: datetime
    actor: str
    """Name of the token, or what stands for it where none was needed."""
    action: str
    """submit, cancel, preset, plan, pin, unpin, remove, gc, verify, rescan, token-create or token-revoke."""
    subject: str
    """What it was done to: the id of a job, dataset or plan, or the name of a token."""
    request: str
    """Id of the request, as in the log; empty for what was done on the machine itself."""


def parse_lifetime(text: str) -> float:
    """Return the days of a text such as ``90d``, ``12h`` or ``4w``; raise ``InvalidRequest``."""
    found = re.fullmatch(r"(\d{1,5})([hdw])", text.strip())
    if found is None or int(found[1]) == 0:
        raise InvalidRequest(f"{text!r} is not a lifetime", "write hours, days or weeks, as in 12h, 90d or 4w")
    return int(found[1]) * _UNITS[found[2]] / _UNITS["d"]
