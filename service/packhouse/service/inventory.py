"""The inventory: which shards, datasets and plans the store holds, how large they are and when they were last used.

The store is the truth; this is what is known of it without looking. Losing it costs a scan of the store, the order of
eviction, and the pins.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sqlalchemy import BigInteger, Engine, cast, exists, func, literal, select, true, union_all, update

from packhouse.client.errors import Evicted, NotFound, Unavailable
from packhouse.client.format import Manifest, read_manifest
from packhouse.client.store import Store
from packhouse.client.wire_cache import CacheEntry, CacheUsage, RecipeUsage
from packhouse.service.database import among, chunks, now, pairs, upsert
from packhouse.service.leases import alive
from packhouse.service.tables import (
    DatasetRow,
    DatasetShardRow,
    LockRow,
    PlanDatasetRow,
    PlanRow,
    ShardRow,
    ShardState,
)

CLEANING = "cleaning"
"""Lock of whoever evicts, removes or rescans."""
PATIENCE = 120.0
"""Seconds that a job waits for shards which are being evicted; a batch of them takes about one."""


class Inventory:
    """What the store holds."""

    def __init__(self, engine: Engine, *, lease: float = 20.0) -> None:
        """``lease`` is how long a service lives without a sign, in seconds."""
        self.engine, self._lease = engine, lease

    def need(self, keys: Collection[str]) -> None:
        """Keep these shards while the job that runs needs them; return once none of them is being evicted.

        Whoever evicts spares what was used since the oldest running job began, and marks what it takes: a job that has
        marked its shards as used, and then sees none of them taken, finds them where they are.
        """
        wanted = sorted(keys)
        for some in chunks(wanted):
            # Their rows are locked in one order: two jobs that need the same shards never wait for each other in turn.
            with self.engine.begin() as connection:
                ordered = select(ShardRow.serial).where(among(connection, ShardRow.key, some)).order_by(ShardRow.serial)
                locked = ordered.with_for_update()
                connection.execute(update(ShardRow).where(ShardRow.serial.in_(locked)).values(used_at=now()))
        end = time.monotonic() + PATIENCE
        for some in chunks(wanted):
            while self._evicting(some):
                if time.monotonic() > end:
                    raise Unavailable("shards that the job needs are still being evicted", "submit the job again")
                time.sleep(0.05)

    def made(self, shards: Mapping[str, int], recipe: str) -> None:
        """Add shards that are in the store now: key → bytes of their files; and the digest of their recipe, or ""."""
        for some in chunks(sorted(shards.items())):
            with self.engine.begin() as connection:
                given = pairs(connection, dict(some))
                columns = (given.c.key, literal(recipe), cast(given.c.value, BigInteger), now(), literal("present"))
                rows = select(*columns).where(true()).order_by(given.c.key)
                changed = ["bytes", "used_at", "state", *(["recipe"] if recipe else [])]
                fresh = upsert(connection, ShardRow, ["key"], changed)
                connection.execute(fresh.from_select(["key", "recipe", "bytes", "used_at", "state"], rows))

    def add_dataset(self, store: Store, dataset_id: str) -> None:
        """Add a dataset that a job has made, or note that it was used; its manifest is only read if it is new."""
        with self.engine.begin() as connection:
            whole = (DatasetRow.id == dataset_id, DatasetRow.evicted_at.is_(None))
            if connection.execute(update(DatasetRow).where(*whole).values(used_at=now())).rowcount:
                return
        self.add_manifest(read_manifest(store, dataset_id))

    def add_manifest(self, manifest: Manifest) -> None:
        """Add a dataset and its shards, all of which are in the store now."""
        sizes = {receipt.key: receipt.data.bytes + receipt.meta.bytes for receipt in manifest.shards}
        self.made(sizes, manifest.recipe_digest)
        with self.engine.begin() as connection:
            row = {"id": manifest.id, "recipe": manifest.recipe_digest, "shards": len(sizes)}
            row |= {"bytes": sum(sizes.values()), **_fresh()}
            serial = connection.execute(
                upsert(connection, DatasetRow, ["id"], ["used_at", "evicted_at"])
                .values(row)
                .returning(DatasetRow.serial)
            ).scalar_one()
            for some in chunks(sizes):
                members = select(literal(serial), ShardRow.serial).where(among(connection, ShardRow.key, some))
                fresh = upsert(connection, DatasetShardRow, ["dataset", "shard"], only=())
                connection.execute(fresh.from_select(["dataset", "shard"], members))

    def add_plan(self, plan_id: str, size: int, datasets: Iterable[str]) -> None:
        """Add a plan of ``size`` bytes, or note that it was used, and its datasets with it."""
        wanted = sorted(set(datasets))
        with self.engine.begin() as connection:
            serial = connection.execute(
                upsert(connection, PlanRow, ["id"], ["used_at", "evicted_at", "bytes"])
                .values({"id": plan_id, "bytes": size, **_fresh()})
                .returning(PlanRow.serial)
            ).scalar_one()
            rows = [{"plan": serial, "dataset": one} for one in wanted]
            connection.execute(upsert(connection, PlanDatasetRow, ["plan", "dataset"], only=()), rows)
        self.use(datasets=wanted)

    def use(self, *, datasets: Collection[str] = (), plans: Collection[str] = (), shards: Collection[str] = ()) -> None:
        """Note that these were used now: a plan with its datasets, a shard with those that have it."""
        used = set(datasets)
        with self.engine.begin() as connection:
            for some in chunks(sorted(plans)):
                connection.execute(update(PlanRow).where(PlanRow.id.in_(some)).values(used_at=now()))
                of = select(PlanDatasetRow.dataset).join(PlanRow, PlanRow.serial == PlanDatasetRow.plan)
                used |= set(connection.scalars(of.where(PlanRow.id.in_(some)).distinct()))
            for some in chunks(sorted(shards)):
                having = (
                    select(DatasetRow.id)
                    .join(DatasetShardRow, DatasetShardRow.dataset == DatasetRow.serial)
                    .join(ShardRow, ShardRow.serial == DatasetShardRow.shard)
                )
                used |= set(connection.scalars(having.where(ShardRow.key.in_(some)).distinct()))
        with self.engine.begin() as connection:
            for some in chunks(sorted(used)):
                ordered = select(DatasetRow.serial).where(DatasetRow.id.in_(some)).order_by(DatasetRow.serial)
                locked = ordered.with_for_update()
                connection.execute(update(DatasetRow).where(DatasetRow.serial.in_(locked)).values(used_at=now()))

    def check_datasets(self, datasets: Collection[str]) -> None:
        """Raise ``Evicted`` if one of these was evicted."""
        self._check(DatasetRow, datasets, "dataset", "submit its job again: what is left of it will be hits")

    def check_plan(self, plan_id: str) -> None:
        """Raise ``Evicted`` if this plan was evicted."""
        self._check(PlanRow, [plan_id], "plan", "build it again, from its datasets")

    def check_shard(self, key: str) -> None:
        """Raise ``Evicted`` if this shard was evicted, or is being."""
        gone = select(ShardRow.serial).where(ShardRow.key == key, ShardRow.state != ShardState.PRESENT)
        with self.engine.connect() as connection:
            if connection.scalar(gone) is not None:
                fact = f"shard {key} was evicted to make room"
                raise Evicted(fact, "submit the job of its dataset again; pin the datasets and plans that must stay")

    def pin(self, entry_id: str, pinned: bool) -> CacheEntry:
        """Pin a dataset or plan, so that it is never evicted, or unpin it; raise ``NotFound`` or ``Evicted``."""
        with self.engine.begin() as connection:
            for table in (DatasetRow, PlanRow):
                there = (table.id == entry_id, table.evicted_at.is_(None))
                connection.execute(update(table).where(*there).values(pinned=pinned))
        entry = self.entry(entry_id)
        if entry.evicted_at is not None:
            self.check_datasets([entry_id])
            self.check_plan(entry_id)
        return entry

    def entry(self, entry_id: str) -> CacheEntry:
        """Return a dataset or plan, or the trace of one that was evicted; raise ``NotFound``."""
        found = self._entries(lambda table: table.id == entry_id, 1)
        if not found:
            raise NotFound(f"the cache has no dataset or plan {entry_id}", "'packhouse cache ls' lists them")
        return found[0]

    def entries(self, after: str | None, limit: int) -> list[CacheEntry]:
        """Return datasets and plans in the order of their ids, from the one behind ``after`` on."""
        return self._entries(lambda table: table.id > (after or ""), limit)

    def usage(self, budget: int | None) -> CacheUsage:
        """Return what the store holds, by recipe."""
        there = ShardRow.state != ShardState.EVICTED
        shards = select(ShardRow.recipe, func.count(), func.sum(ShardRow.bytes)).where(there).group_by(ShardRow.recipe)
        datasets = select(DatasetRow.recipe, func.count()).where(DatasetRow.evicted_at.is_(None))
        plans = select(func.count(), func.coalesce(func.sum(PlanRow.bytes), 0)).where(PlanRow.evicted_at.is_(None))
        with self.engine.connect() as connection:
            rows = connection.execute(datasets.group_by(DatasetRow.recipe))
            named = {recipe: count for recipe, count in rows}  # noqa: C416 - mypy takes rows for lists
            recipes = [
                RecipeUsage(recipe=recipe, shards=count, bytes=int(size), datasets=named.get(recipe, 0))
                for recipe, count, size in connection.execute(shards)
            ]
            plan_count, plan_bytes = connection.execute(plans).one()
        recipes.sort(key=lambda one: (-one.bytes, one.recipe))
        return CacheUsage(
            bytes=sum(one.bytes for one in recipes) + int(plan_bytes),
            budget=budget,
            shards=sum(one.shards for one in recipes),
            datasets=sum(named.values()),
            plans=plan_count,
            plan_bytes=int(plan_bytes),
            recipes=recipes,
        )

    def size(self) -> int:
        """Return the bytes of all shards and plans."""
        shards = select(func.coalesce(func.sum(ShardRow.bytes), 0)).where(ShardRow.state != ShardState.EVICTED)
        plans = select(func.coalesce(func.sum(PlanRow.bytes), 0)).where(PlanRow.evicted_at.is_(None))
        with self.engine.connect() as connection:
            return int(connection.scalar(shards) or 0) + int(connection.scalar(plans) or 0)

    def _evicting(self, keys: Collection[str]) -> bool:
        """Return whether one of ``keys`` may be being evicted; what a dead service was about to evict is set free."""
        working = exists().where(LockRow.name == CLEANING, LockRow.owner.in_(alive(self._lease)))
        with self.engine.connect() as connection:
            marked = (among(connection, ShardRow.key, keys), ShardRow.state == ShardState.EVICTING)
            if connection.scalar(select(ShardRow.serial).where(*marked).limit(1)) is None:
                return False
            if connection.scalar(select(working)):
                return True
        # The store tells what is left of them: a receipt that is there, or a miss.
        with self.engine.begin() as connection:
            # Whoever takes the lock now waits for this row, or this for them.
            connection.execute(select(LockRow.owner).where(LockRow.name == CLEANING).with_for_update())
            freed = update(ShardRow).where(*marked, ~working).values(state=ShardState.EVICTED)
            return connection.execute(freed).rowcount == 0

    def _check(self, table: Any, ids: Collection[str], kind: str, remedy: str) -> None:
        gone = select(table.id, table.evicted_at).where(table.id.in_(sorted(ids)), table.evicted_at.is_not(None))
        with self.engine.connect() as connection:
            found = connection.execute(gone.limit(1)).first()
        if found is not None:
            when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(found[1]))
            raise Evicted(f"{kind} {found[0]} was evicted on {when} to make room", f"{remedy}; pin what must stay")

    def _entries(self, condition: Any, limit: int) -> list[CacheEntry]:
        columns = ("id", "bytes", "created_at", "used_at", "pinned", "evicted_at")
        each: list[Any] = []
        for kind, table, shards in (("dataset", DatasetRow, DatasetRow.shards), ("plan", PlanRow, literal(0))):
            named = [getattr(table, name).label(name) for name in columns]
            each.append(select(literal(kind).label("kind"), shards.label("shards"), *named).where(condition(table)))
        both = union_all(*each).subquery()
        with self.engine.connect() as connection:
            rows = connection.execute(select(both).order_by(both.c.id).limit(limit)).mappings()
            return [CacheEntry.model_validate(dict(row)) for row in rows]


def _fresh() -> dict[str, Any]:
    return {"created_at": now(), "used_at": now(), "pinned": False, "evicted_at": None}
