"""What the store holds, as pages list it: datasets and plans by time or size, and sums of what is pinned."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Engine, func, select

from packhouse.client.wire_cache import CacheUsage
from packhouse.service.space import Space
from packhouse.service.tables import DatasetRow, PlanDatasetRow, PlanRow

KEPT = 5.0
"""Seconds that sums over all shards are shown again before they are made anew."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A dataset or a plan."""

    id: str
    recipe: str
    """Digest of its recipe; empty for a plan."""
    shards: int
    bytes: int
    created_at: datetime
    used_at: datetime
    pinned: bool


class Stored:
    """What is in the store now. Any thread may call any method."""

    def __init__(self, space: Space) -> None:
        self._space, self._engine = space, space.inventory.engine
        self._lock = threading.Lock()
        self._usage: CacheUsage | None = None
        self._counted = 0.0

    def usage(self) -> CacheUsage:
        """Return what the store holds by recipe; at most some seconds old."""
        with self._lock:
            if self._usage is None or time.monotonic() - self._counted >= KEPT:
                self._usage, self._counted = self._space.usage(), time.monotonic()
            return self._usage

    def pinned(self) -> tuple[int, int]:
        """Return how many datasets and plans are pinned, and their bytes; what two share counts twice."""
        count = size = 0
        with self._engine.connect() as connection:
            for table in (DatasetRow, PlanRow):
                sums = select(func.count(), func.coalesce(func.sum(table.bytes), 0))
                here = connection.execute(sums.where(table.pinned, table.evicted_at.is_(None))).one()
                count, size = count + here[0], size + int(here[1])
        return count, size

    def datasets(self, *, offset: int, limit: int, by_size: bool = False) -> list[Entry]:
        """Return datasets, newest or largest first."""
        row = DatasetRow
        order = row.bytes.desc() if by_size else row.created_at.desc()
        columns = (row.id, row.recipe, row.shards, row.bytes, row.created_at, row.used_at, row.pinned)
        query = select(*columns).where(row.evicted_at.is_(None)).order_by(order, row.serial.desc())
        return _entries(self._engine, query.offset(offset).limit(limit), lambda values: values)

    def plans(self, *, offset: int, limit: int, dataset: str | None = None) -> list[Entry]:
        """Return plans, newest first: all, or those that draw from a dataset."""
        row = PlanRow
        columns = (row.id, row.bytes, row.created_at, row.used_at, row.pinned)
        query = select(*columns).where(row.evicted_at.is_(None)).order_by(row.created_at.desc(), row.serial.desc())
        if dataset is not None:
            query = query.where(row.serial.in_(select(PlanDatasetRow.plan).where(PlanDatasetRow.dataset == dataset)))
        return _entries(self._engine, query.offset(offset).limit(limit), lambda values: (values[0], "", 0, *values[1:]))

    def datasets_of(self, plans: list[str]) -> dict[str, list[str]]:
        """Return the datasets that each of some plans draws from."""
        found: dict[str, list[str]] = {one: [] for one in plans}
        query = select(PlanRow.id, PlanDatasetRow.dataset).join(PlanDatasetRow, PlanDatasetRow.plan == PlanRow.serial)
        with self._engine.connect() as connection:
            for plan, dataset in connection.execute(
                query.where(PlanRow.id.in_(plans)).order_by(PlanDatasetRow.dataset)
            ):
                found[plan].append(dataset)
        return found

    def pin(self, dataset_id: str) -> bool:
        """Return whether a dataset is pinned."""
        with self._engine.connect() as connection:
            return bool(connection.scalar(select(DatasetRow.pinned).where(DatasetRow.id == dataset_id)))


def _entries(engine: Engine, query: Any, values: Callable[[Any], Any]) -> list[Entry]:
    with engine.connect() as connection:
        rows = [values(tuple(row)) for row in connection.execute(query)]
    return [
        Entry(one, recipe, shards, int(size), _time(created), _time(used), bool(pinned))
        for one, recipe, shards, size, created, used, pinned in rows
    ]


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
