"""What may go from a store, and in which order.

First come shards that no whole dataset has: of jobs that failed, and what is left of datasets that were evicted. Then
come the datasets, as they were used; of a shard that several have, the youngest one counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, Row, Select, exists, func, or_, select, tuple_
from sqlalchemy.sql.elements import ColumnElement

from packhouse.client.wire import JobState
from packhouse.service.database import CHUNK, chunks, now
from packhouse.service.keep import Keep
from packhouse.service.tables import (
    DatasetRow,
    DatasetShardRow,
    JobRow,
    PlanDatasetRow,
    PlanRow,
    ShardRow,
    ShardState,
)

Rows = Sequence[Row[*tuple[Any, ...]]]
"""Shards: serial, key and bytes."""


@dataclass(frozen=True, slots=True)
class Source:
    """Shards that go one after the other: of a dataset, or of none."""

    dataset: str | None
    serials: Select[int]
    """The query for its shards, in their order, but for what of them stays."""
    may_go: tuple[ColumnElement[bool], ...]


@dataclass(frozen=True, slots=True)
class Times:
    """Since when what was used stays, in seconds since 1970 by the database's clock."""

    needed: float
    """Since the oldest job that runs began, or now: it may need what was used since."""
    recent: float
    plans: float

    @property
    def cutoff(self) -> float:
        """Since when shards stay."""
        return min(self.needed, self.recent)


class Candidates:
    """What may go."""

    def __init__(self, engine: Engine, keep: Keep) -> None:
        self._engine, self._keep = engine, keep

    def sources(self) -> Iterator[Source]:
        """Yield where shards are taken from, in order: those that no whole dataset has, then dataset by dataset."""
        times = self.times()
        free = (ShardRow.state == ShardState.PRESENT, ShardRow.used_at < times.cutoff)
        whole = DatasetRow.evicted_at.is_(None)
        yield Source(None, select(ShardRow.serial).order_by(ShardRow.serial), (*free, ~member(whole)))
        kept, order = self._kept(times), (DatasetRow.used_at, DatasetRow.serial)
        query = select(DatasetRow.id, *order).where(whole, ~kept).order_by(*order)
        with self._engine.connect() as connection:
            datasets = connection.execute(query).all()
        for dataset, used_at, serial in datasets:
            of = select(DatasetShardRow.shard).where(DatasetShardRow.dataset == serial)
            stays = member(whole, or_(kept, tuple_(*order) > (used_at, serial)))
            yield Source(dataset, of.order_by(DatasetShardRow.shard), (*free, ~stays))

    def sums(self, source: Source) -> tuple[int, int]:
        """Return how many shards of a source may go, and their bytes."""
        may_go = source.may_go
        if source.dataset is not None:
            may_go = (ShardRow.serial.in_(source.serials.order_by(None)), *may_go)
        sums = select(func.count(), func.coalesce(func.sum(ShardRow.bytes), 0)).where(*may_go)
        with self._engine.connect() as connection:
            count, size = connection.execute(sums).one()
        return count, int(size)

    def pages(self, source: Source, limit: int) -> Iterator[Rows]:
        """Yield the shards of a source that may go; their order does not matter, as they were used together.

        Each window of their serials is looked up by itself: no query sorts them all, nor begins anew.
        """
        (serial,) = source.serials.selected_columns
        last = 0
        while True:
            with self._engine.connect() as connection:
                window = connection.scalars(source.serials.where(serial > last).limit(CHUNK)).all()
                if not window:
                    return
                last = window[-1]
                rows = connection.execute(shards().where(ShardRow.serial.in_(window), *source.may_go)).all()
            yield from chunks(rows, limit)

    def may_go(self) -> tuple[ColumnElement[bool], ...]:
        """Return the condition of a shard that may go now, the columns of its own row first, two of them."""
        times = self.times()
        kept = member(DatasetRow.evicted_at.is_(None), self._kept(times))
        return ShardRow.state == ShardState.PRESENT, ShardRow.used_at < times.cutoff, ~kept

    def old_plans(self) -> dict[str, int]:
        """Return the plans that may go, those used longest ago first, with their bytes."""
        query = select(PlanRow.id, PlanRow.bytes).where(PlanRow.evicted_at.is_(None), ~_live(self.times()))
        with self._engine.connect() as connection:
            return {plan: size for plan, size in connection.execute(query.order_by(PlanRow.used_at))}  # noqa: C416

    def live_plans_of(self, dataset_id: str) -> list[str]:
        """Return the plans that keep a dataset."""
        of = select(PlanDatasetRow.plan).where(PlanDatasetRow.dataset == dataset_id)
        with self._engine.connect() as connection:
            query = select(PlanRow.id).where(PlanRow.serial.in_(of), _live(self.times())).order_by(PlanRow.id)
            return list(connection.scalars(query))

    def times(self) -> Times:
        """Return since when things stay. Values, since a now that the database looked up later would spare less."""
        oldest = select(func.min(JobRow.taken_at)).where(JobRow.state == JobState.RUNNING)
        with self._engine.connect() as connection:
            at = float(connection.scalar(select(now())) or 0)
            taken = connection.scalar(oldest)
        needed, recent = at if taken is None else min(float(taken), at), at - self._keep.recent
        return Times(needed, recent, at - self._keep.plans)

    def _kept(self, times: Times) -> ColumnElement[bool]:
        """Return the condition of a dataset that stays: pinned, used lately, or of a plan that may be in use."""
        of_live_plans = select(PlanDatasetRow.dataset).join(PlanRow, PlanRow.serial == PlanDatasetRow.plan)
        of_live_plans = of_live_plans.where(_live(times))
        return or_(DatasetRow.pinned, DatasetRow.used_at >= times.recent, DatasetRow.id.in_(of_live_plans))


def member(*condition: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return whether a shard is in a dataset of which ``condition`` holds."""
    tied = (DatasetShardRow.shard == ShardRow.serial, DatasetShardRow.dataset == DatasetRow.serial)
    return exists().where(*tied, *condition)


def _live(times: Times) -> ColumnElement[bool]:
    """Return the condition of a plan that may be in use."""
    return PlanRow.evicted_at.is_(None) & or_(PlanRow.pinned, PlanRow.used_at >= times.plans)


def shards() -> Any:
    """Return the query for ``Rows``."""
    return select(ShardRow.serial, ShardRow.key, ShardRow.bytes)
