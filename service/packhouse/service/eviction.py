"""Eviction: what was used longest ago goes first, and what is needed, pinned or young stays.

A shard goes in three steps, each of which may be the last one of a process that dies: it is marked in the database; its
receipt is removed, and then its files, so that half of a shard is a miss and never a hit; it is noted as evicted. What
is left marked is finished by the next who evicts. Manifests of datasets that lose a shard go before the shard does.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Engine, select, update
from sqlalchemy.sql.elements import ColumnElement

from packhouse.client.format import data_path, manifest_path, meta_path, receipt_path, rejected_path
from packhouse.client.plan import plan_path
from packhouse.client.store import Store
from packhouse.service.candidates import Candidates, Rows, Source, member
from packhouse.service.database import CHUNK, now
from packhouse.service.keep import Keep
from packhouse.service.tables import (
    DatasetRow,
    DatasetShardRow,
    PlanDatasetRow,
    PlanRow,
    ShardRow,
    ShardState,
)

BATCH = 250
"""Shards that are marked, and then removed, together: a job that needs one of them waits for that long."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What goes together, or would."""

    shards: int = 0
    bytes: int = 0
    datasets: frozenset[str] = frozenset()
    """Those that lose shards."""
    plans: frozenset[str] = frozenset()
    """Those that go with them."""


class Eviction:
    """Eviction from one store. The caller sees to it that only one runs."""

    def __init__(self, engine: Engine, store: Store, keep: Keep) -> None:
        self._engine, self._store = engine, store
        self.candidates = Candidates(engine, keep)

    def finish(self) -> None:
        """Remove what one that died had marked."""
        marked = select(ShardRow.serial, ShardRow.key, ShardRow.bytes).where(ShardRow.state == ShardState.EVICTING)
        while True:
            with self._engine.connect() as connection:
                rows = connection.execute(marked.limit(BATCH)).all()
            if not rows:
                return
            self._drop_manifests(rows)
            self._remove(rows)

    def foresee(self, bytes_to_free: int) -> Iterator[Batch]:
        """Yield what ``evict`` would remove, and remove nothing."""
        freed = 0
        plans: set[str] = set()
        for source in self.candidates.sources():
            count, size = self.candidates.sums(source)
            if not count:
                continue
            if size > bytes_to_free - freed:
                count, size = _first_bytes(self.candidates.pages(source, CHUNK), bytes_to_free - freed)
            datasets = {source.dataset} if source.dataset else set()
            going = {plan: bytes_ for plan, bytes_ in self._plans_of(datasets).items() if plan not in plans}
            plans |= going.keys()
            batch = Batch(count, size + sum(going.values()), frozenset(datasets), frozenset(going))
            freed += batch.bytes
            yield batch
            if freed >= bytes_to_free:
                return
        old = {plan: size for plan, size in self.candidates.old_plans().items() if plan not in plans}
        rest = _until(old, bytes_to_free - freed)
        yield Batch(bytes=sum(rest.values()), plans=frozenset(rest))

    def evict(self, bytes_to_free: int) -> Iterator[Batch]:
        """Remove what was used longest ago until so many bytes are free, or all that may go is gone."""
        freed = 0
        for source in self.candidates.sources():
            if source.dataset is None and not self.candidates.sums(source)[0]:
                continue  # as a rule there are none; to page through all shards takes longer than to count
            for rows in self.candidates.pages(source, BATCH):
                batch = self._take(_within(rows, bytes_to_free - freed))
                freed += batch.bytes
                yield batch
                if freed >= bytes_to_free:
                    return
        # No shard may go any more; plans are small beside them.
        yield self._evict_plans(_until(self.candidates.old_plans(), bytes_to_free - freed))

    def remove_dataset(self, dataset_id: str) -> Iterator[Batch]:
        """Remove the shards that no other dataset has and no job that runs may need, however young they are."""
        self._store.delete(manifest_path(dataset_id))
        with self._engine.begin() as connection:
            gone = update(DatasetRow).where(DatasetRow.id == dataset_id).values(evicted_at=now())
            dataset = connection.execute(gone.returning(DatasetRow.serial)).scalar_one()
        yield self._evict_plans(self._plans_of({dataset_id}))
        of = select(DatasetShardRow.shard).where(DatasetShardRow.dataset == dataset)
        other = member(DatasetRow.serial != dataset, DatasetRow.evicted_at.is_(None))
        free = (ShardRow.state == ShardState.PRESENT, ShardRow.used_at < self.candidates.times().needed)
        own = Source(dataset_id, of.order_by(DatasetShardRow.shard), (*free, ~other))
        for rows in self.candidates.pages(own, BATCH):
            yield self._take(rows, *own.may_go)

    def remove_plan(self, plan_id: str) -> Iterator[Batch]:
        """Remove a plan, however young it is."""
        with self._engine.connect() as connection:
            size = connection.scalar(select(PlanRow.bytes).where(PlanRow.id == plan_id)) or 0
        yield self._evict_plans({plan_id: size})

    def _take(self, rows: Rows, *condition: ColumnElement[bool]) -> Batch:
        """Mark those of ``rows`` that may still go, and remove them."""
        serials = [row.serial for row in rows]
        may_go = condition or self.candidates.may_go()
        # In the order of all who lock several rows, so that none waits for another in turn.
        chosen = select(ShardRow.serial).where(ShardRow.serial.in_(serials), *may_go)
        ordered = chosen.order_by(ShardRow.serial).with_for_update(of=ShardRow)
        with self._engine.begin() as connection:
            mark = update(ShardRow).where(ShardRow.serial.in_(ordered), *may_go[:2])
            marked = connection.execute(
                mark.values(state=ShardState.EVICTING).returning(ShardRow.serial, ShardRow.key, ShardRow.bytes)
            ).all()
        datasets = self._drop_manifests(marked)
        plans = self._evict_plans(self._plans_of(datasets))
        self._remove(marked)
        size = sum(row.bytes for row in marked) + plans.bytes
        return Batch(len(marked), size, frozenset(datasets), plans.plans)

    def _drop_manifests(self, rows: Rows) -> set[str]:
        """Note and remove the datasets that lose ``rows``; return those that were whole until now."""
        datasets = self._datasets_of([row.serial for row in rows])
        for dataset in sorted(datasets):
            self._store.delete(manifest_path(dataset))
        with self._engine.begin() as connection:
            gone = update(DatasetRow).where(DatasetRow.id.in_(sorted(datasets))).values(evicted_at=now())
            connection.execute(gone)
        return datasets

    def _remove(self, rows: Rows) -> None:
        """Remove the files of marked shards, and note it."""
        for path in (receipt_path, data_path, meta_path, rejected_path):
            for row in rows:
                self._store.delete(path(row.key))
        with self._engine.begin() as connection:
            marked = (ShardRow.serial.in_([row.serial for row in rows]), ShardRow.state == ShardState.EVICTING)
            connection.execute(update(ShardRow).where(*marked).values(state=ShardState.EVICTED, used_at=now()))

    def _datasets_of(self, serials: Sequence[int]) -> set[str]:
        """Return the datasets, evicted ones left out, that have one of these shards."""
        whole = select(DatasetRow.id).where(
            DatasetRow.evicted_at.is_(None),
            DatasetRow.serial.in_(select(DatasetShardRow.dataset).where(DatasetShardRow.shard.in_(serials))),
        )
        with self._engine.connect() as connection:
            return set(connection.scalars(whole))

    def _plans_of(self, datasets: set[str]) -> dict[str, int]:
        """Return the plans that draw from ``datasets``, with their bytes."""
        of = select(PlanDatasetRow.plan).where(PlanDatasetRow.dataset.in_(sorted(datasets)))
        query = select(PlanRow.id, PlanRow.bytes).where(PlanRow.serial.in_(of), PlanRow.evicted_at.is_(None))
        with self._engine.connect() as connection:
            return {plan: size for plan, size in connection.execute(query)}  # noqa: C416 - mypy takes rows for lists

    def _evict_plans(self, plans: Mapping[str, int]) -> Batch:
        """Note and remove plans, each with its bytes."""
        for plan in plans:
            parts = list(self._store.list(f"packs/{plan}"))
            for path in (plan_path(plan), *parts):  # a plan exists when its header does: that goes first
                self._store.delete(path)
            with self._engine.begin() as connection:  # last: what is cut short is done again
                connection.execute(update(PlanRow).where(PlanRow.id == plan).values(evicted_at=now()))
        return Batch(bytes=sum(plans.values()), plans=frozenset(plans))


def _within(rows: Rows, size: int) -> Rows:
    """Return the first rows that have ``size`` bytes together, or all."""
    for number, row in enumerate(rows):
        size -= row.bytes
        if size <= 0:
            return rows[: number + 1]
    return rows


def _first_bytes(pages: Iterator[Rows], size: int) -> tuple[int, int]:
    """Return how many shards have ``size`` bytes together, and how many bytes they have."""
    count = total = 0
    for rows in pages:
        taken = _within(rows, size - total)
        count, total = count + len(taken), total + sum(row.bytes for row in taken)
        if total >= size:
            break
    return count, total


def _until(plans: Mapping[str, int], size: int) -> dict[str, int]:
    """Return the first plans that have ``size`` bytes together, or all."""
    taken: dict[str, int] = {}
    for plan, one in plans.items():
        if sum(taken.values()) >= size:
            break
        taken[plan] = one
    return taken
