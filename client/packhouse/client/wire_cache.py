"""REST models of the cache: what the store holds, and what goes to make room."""

import re
from datetime import datetime
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from packhouse.client.errors import InvalidRequest
from packhouse.client.wire import Wire

_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?) ?([kmgtp]?)(i?)b?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes that a size such as 500GB, 1.5 TiB or 1000000 means; raise ``InvalidRequest``."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        raise InvalidRequest(f"{text!r} is not a size", "write one like 500GB, 1.5TB or 200GiB")
    power = " kmgtp".index(found[2].lower() or " ")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def show_size(size: int) -> str:
    """Return a size for people: three digits and a decimal unit."""
    if size < 1000:
        return f"{size} B"
    power = next(power for power in range(1, 6) if size < 999.5 * 1000**power or power == 5)
    return f"{size / 1000**power:.3g} {' kMGTP'[power]}B"


class RecipeUsage(Wire):
    """What the shards of one recipe take."""

    recipe: str
    """Recipe digest; empty for shards of no dataset whose recipe is not known."""
    shards: int
    bytes: int
    datasets: int


class CacheUsage(Wire):
    """What the store holds. Sources are not in it, and never touched."""

    bytes: int
    """Of all shards and plans."""
    budget: int | None
    """Bytes above which what was used longest ago is evicted; None evicts nothing by itself."""
    shards: int
    datasets: int
    plans: int
    plan_bytes: int
    recipes: list[RecipeUsage]
    """The largest first."""


class CacheEntry(Wire):
    """A dataset or a plan in the cache, or the trace of one that was evicted."""

    id: str
    kind: Literal["dataset", "plan"]
    bytes: int
    """Of a dataset: of its shards, which other datasets may have too."""
    shards: int
    created_at: datetime
    used_at: datetime
    pinned: bool
    evicted_at: datetime | None


class GcSpec(Wire):
    """A request to make room."""

    model_config = ConfigDict(strict=True)

    budget: Annotated[int, Field(ge=0)] | None = None
    """Bytes that may stay; None means the service's own budget."""
    dry_run: bool = False
    """Say what would go, and let it stay."""


class GcReport(Wire):
    """What was evicted so far, or in a dry run would be."""

    dry_run: bool
    budget: int
    bytes: int
    """What the store held before."""
    freed: int = 0
    shards: int = 0
    datasets: int = 0
    plans: int = 0
    examples: tuple[str, ...] = ()
    """The first hundred datasets that lose shards, and plans that go."""
    over: int = 0
    """Bytes still above the budget; once ``done``, what is needed, pinned or too young to go."""
    done: bool = False


class RescanReport(Wire):
    """What was found in the store so far."""

    datasets: int = 0
    plans: int = 0
    shards: int = 0
    found: int = 0
    """Shards that the catalog did not know."""
    lost: int = 0
    """Shards that the catalog knew and that are not there."""
    damaged: tuple[str, ...] = ()
    """The first hundred files that cannot be read."""
    done: bool = False
