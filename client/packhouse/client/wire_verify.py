"""REST models of the check of the cache: every stored file is read again."""

from typing import Literal

from packhouse.client.wire import Wire


class VerifySpec(Wire):
    """What to verify."""

    shards: list[str] = []  # noqa: RUF012 - pydantic copies it
    """Keys of shards; none means everything."""


class VerifyFinding(Wire):
    """A stored file that is not what it should be. The next job that needs it builds it again."""

    file: str
    """Its key in the store."""
    fault: Literal["missing", "empty", "cut", "altered", "unreadable"]
    moved: str | None
    """Its key in quarantine; None for a missing one."""


class VerifyReport(Wire):
    """What was verified so far."""

    shards: int = 0
    datasets: int = 0
    """Manifests."""
    bytes: int = 0
    damaged: int = 0
    """Files that are not what they should be."""
    unfinished: int = 0
    """Shards without a receipt: being written, left by a killed writer, or one whose receipt is lost. No job takes them
    for anything, and the next that needs one builds it."""
    share: float = 0.0
    """Of the shards, about."""
    finding: VerifyFinding | None = None
    """The file that this step has found, where it has."""
    done: bool = False
