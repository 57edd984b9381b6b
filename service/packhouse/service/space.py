"""Space: keeps the store within its budget, and the inventory what the store is.

Uses are gathered here and written in batches; one thread writes them, and makes room when the store has outgrown its
budget. Of all services on one database one cleans at a time.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from packhouse.client.errors import InvalidRequest, PackhouseError
from packhouse.client.store import Store
from packhouse.client.wire_cache import CacheUsage, GcReport, RescanReport
from packhouse.service.eviction import Batch, Eviction
from packhouse.service.forgetting import forget
from packhouse.service.inventory import CLEANING, Inventory
from packhouse.service.keep import Keep
from packhouse.service.leases import Signs
from packhouse.service.problems import Conflict
from packhouse.service.rescan import is_another, rescan, stored_plan

log = logging.getLogger(__name__)

TICK = 5.0
"""Seconds between two batches of uses, and between two looks at the size of the store."""
STOP_WITHIN = 3.0
"""Seconds that a batch which is under way may still take when the service stops."""
EXAMPLES = 100

R = TypeVar("R", GcReport, RescanReport)
Kind = Literal["datasets", "plans", "shards"]


class Space:
    """The room that a store takes. Any thread may call any method."""

    def __init__(
        self,
        inventory: Inventory,
        store: Store,
        signs: Signs,
        *,
        budget: int | None = None,
        keep: Keep = Keep(),
        tick: float = TICK,
    ) -> None:
        """``budget`` is what may stay, in bytes; None lets everything stay until someone asks."""
        self.inventory, self._store, self._signs = inventory, store, signs
        self._budget, self._tick = budget, tick
        self._eviction = Eviction(inventory.engine, store, keep)
        self._lock = threading.Lock()
        self._used: defaultdict[Kind, set[str]] = defaultdict(set)
        self.on_plans_gone: Callable[[], None] = lambda: None
        """Called after plans were removed."""
        self._left_over = 0
        """Bytes above the budget that could not go the last time; 0 is no reason to look again either."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep_room, name="space", daemon=True)

    def start(self) -> None:
        """Begin to write down uses and to make room."""
        self._thread.start()

    def stop(self) -> None:
        """Write down the last uses; what is being evicted is finished or left for the next one."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_WITHIN)

    def used(self, kind: Kind, one: str) -> None:
        """Remember that something was used now."""
        with self._lock:
            self._used[kind].add(one)

    def write_uses(self) -> None:
        """Write down what was used since the last time."""
        with self._lock:
            used, self._used = self._used, defaultdict(set)
        if used:
            self.inventory.use(datasets=used["datasets"], plans=used["plans"], shards=used["shards"])

    def usage(self) -> CacheUsage:
        """Return what the store holds."""
        return self.inventory.usage(self._budget)

    def plan_built(self, plan_id: str, datasets: list[str]) -> None:
        """Add a plan that was built, or note that it was asked for again."""
        self.inventory.add_plan(plan_id, stored_plan(self._store, plan_id)[0], datasets)

    def gc(self, budget: int | None = None, *, dry_run: bool = False) -> Iterator[GcReport]:
        """Evict until the store holds at most ``budget`` bytes; yield how far it is, the last time when it is done.

        The first step raises ``InvalidRequest`` where there is no budget, and ``Conflict`` while someone else cleans.
        """
        limit = self._budget if budget is None else budget
        if limit is None:
            raise InvalidRequest("there is no budget to keep", "name one, or set PACKHOUSE_STORE_BUDGET")
        self.write_uses()
        if dry_run:
            yield from self._free(limit, self._eviction.foresee, dry_run=True)
            return
        with self._alone():
            self._eviction.finish()
            yield from self._free(limit, self._eviction.evict, dry_run=False)
            forget(self.inventory.engine)

    def remove(self, entry_id: str) -> Iterator[GcReport]:
        """Remove a dataset with the shards that only it has, or a plan; yield how far it is.

        The first step raises ``NotFound`` and ``Evicted``, and ``Conflict`` for what is pinned or in use.
        """
        entry = self.inventory.entry(entry_id)
        self.inventory.check_datasets([entry_id])
        self.inventory.check_plan(entry_id)
        if entry.pinned:
            raise Conflict(f"{entry.kind} {entry_id} is pinned", "unpin it first")
        if entry.kind == "dataset" and (plans := self._eviction.candidates.live_plans_of(entry_id)):
            fact = f"{len(plans)} plans that may be in use draw from dataset {entry_id}, {plans[0]} among them"
            raise Conflict(fact, "remove the plans first")
        with self._alone():
            report = GcReport(dry_run=False, budget=0, bytes=self.inventory.usage(None).bytes)
            remove = self._eviction.remove_plan if entry.kind == "plan" else self._eviction.remove_dataset
            for batch in remove(entry_id):
                yield (report := self._added(report, batch))
            yield report.model_copy(update={"done": True})

    def rescan(self) -> Iterator[RescanReport]:
        """Make the inventory what the store is; yield how far it is.

        The first step raises ``Conflict`` while someone else cleans.
        """
        with self._alone():
            yield from rescan(self.inventory, self._store)

    def _free(self, budget: int, batches: Callable[[int], Iterator[Batch]], *, dry_run: bool) -> Iterator[GcReport]:
        before = self.inventory.usage(None).bytes
        report = GcReport(dry_run=dry_run, budget=budget, bytes=before, over=max(0, before - budget))
        yield report
        if report.over:
            for batch in batches(report.over):
                yield (report := self._added(report, batch))
        yield report.model_copy(update={"done": True})

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._signs.lock(CLEANING):
            raise Conflict("the cache is being cleaned or rescanned already", "try again when that has ended")
        try:
            yield
        finally:
            self._signs.unlock(CLEANING)

    def _keep_room(self) -> None:
        looked = False
        while not self._stopping.is_set():
            try:
                if not looked:
                    self._look()
                    looked = True
                self.write_uses()
                if self._budget is not None:
                    self._make_room(self._budget)
            except (PackhouseError, SQLAlchemyError) as error:
                log.warning("the space of the store is not kept now: %s", error)
            self._stopping.wait(self._tick)
        with suppress(SQLAlchemyError):
            self.write_uses()

    def _look(self) -> None:
        """Scan a store that is not the one of the catalog: the database is new or was lost, or the store is another."""
        if is_another(self.inventory, self._store):
            report = self._until_stopped(self.rescan())
            where = self._store.location
            log.warning("the catalog was not that of the store %s: %d shards were found", where, report.shards)

    def _make_room(self, budget: int) -> None:
        over = self.inventory.size() - budget
        if over <= 0 or over == self._left_over:
            return
        try:
            report = self._until_stopped(self.gc())
        except Conflict:
            return  # someone else does it
        log.info("evicted %d shards and %d plans, %d bytes", report.shards, report.plans, report.freed)
        self._left_over = report.over
        if report.over:
            log.warning("the store is %d bytes over its budget: what is left is needed, pinned or young", report.over)

    def _until_stopped(self, steps: Iterator[R]) -> R:
        """Return the last step, or the one at which the service stops."""
        for step in steps:
            last = step
            if self._stopping.is_set():
                break
        return last

    def _added(self, report: GcReport, batch: Batch) -> GcReport:
        if batch.plans and not report.dry_run:
            self.on_plans_gone()
        return _sum(report, batch)


def _sum(report: GcReport, batch: Batch) -> GcReport:
    named = [*report.examples, *sorted(batch.datasets), *sorted(batch.plans)]
    return report.model_copy(
        update={
            "freed": report.freed + batch.bytes,
            "over": max(0, report.over - batch.bytes),
            "shards": report.shards + batch.shards,
            "datasets": report.datasets + len(batch.datasets),
            "plans": report.plans + len(batch.plans),
            "examples": tuple(named[:EXAMPLES]),
        }
    )
