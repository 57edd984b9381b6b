"""Encoding: every block of a job as a shard, taken from the store or made by the workers, each once.

The shards do not depend on what ran where or ended when. An audit that fails, here or in another job, makes what the
failed part has made a miss again, so the store is asked until nothing that the job takes is suspect.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from packhouse.client.format import Receipt
from packhouse.client.receipt_file import ReceiptFile
from packhouse.client.store import Store
from packhouse.client.wire import Change, Miss
from packhouse.worker.attached import file_misses, note_files
from packhouse.worker.crew import TICK_SECONDS, Crew
from packhouse.worker.executor import Task
from packhouse.worker.flights import Flights
from packhouse.worker.grouping import grouped
from packhouse.worker.lookup import (
    Index,
    Lookup,
    Misses,
    Needs,
    NoEviction,
    Why,
    failed_parts,
    look_up,
    note_audit_failed,
    note_recipe,
    note_seen,
)
from packhouse.worker.provenance import suspect
from packhouse.worker.recipe import Recipe
from packhouse.worker.sources import Block
from packhouse.worker.tally import Report
from packhouse.worker.work import Done, encode_blocks

TASK_BYTES = 8 << 20
"""Small blocks go to a worker together, up to so many bytes."""
TASK_BLOCKS = 64
"""And up to so many blocks."""
MISSES_TOLD = 20
"""Kinds of misses that a job tells of with what changed, those of most blocks."""


@dataclass(frozen=True, slots=True)
class Cache:
    """Where shards lie, what is remembered of them, and who else uses them."""

    store: Store
    index: Index
    needs: Needs = field(default_factory=NoEviction)
    flights: Flights = field(default_factory=Flights)


def look_up_blocks(
    blocks: Mapping[str, Block], recipe: Recipe, store: Store, index: Index, failed: Collection[str]
) -> Lookup:
    """Look for the shards of ``blocks``, given by their digests; see ``look_up``."""
    found = look_up(recipe.shard_keys(blocks), recipe, store, index, failed)
    reasons = {digest: why.reason for digest, why in found.misses.items()}
    file_misses((blocks[digest] for digest in reasons), reasons, index)
    named = {digest: Why(reason) for digest, reason in reasons.items() if reason != found.misses[digest].reason}
    return replace(found, misses=found.misses | named)


class Encoding:
    """The shards of one job."""

    def __init__(
        self, cache: Cache, crew: Crew, recipe: Recipe, report: Report, on_encoded: Callable[[Done], None]
    ) -> None:
        """``on_encoded`` is told of each block that a worker has encoded; what it raises ends the job."""
        self.cache, self.crew, self.recipe, self.report, self.on_encoded = cache, crew, recipe, report, on_encoded
        self.tally = report.tally
        self.receipts: dict[str, Receipt] = {}
        """By block digest."""
        self.failed: frozenset[str] = frozenset()
        """Parts of the fast way that an audit has found wrong; one is enough for the slow way."""
        self._made_by: dict[str, Mapping[str, Any]] = {}
        self._hits: set[str] = set()
        self._whys: dict[str, Why] = {}
        """Why blocks are misses, those that are still missing and those that have been made."""
        self._misses = Misses()
        self._changes: dict[Why, tuple[Change, ...]] = {}
        self._begun: set[str] = set()
        """Blocks that this job, or one that it waited for, began to make."""
        self._landings = 0
        """What other jobs had landed at the last lookup."""
        self._others: dict[str, Block] = {}
        """Blocks that another job makes now."""

    def make(self, blocks: Sequence[Block]) -> None:
        """See to it that every block has a receipt. Raises what ``Crew.results`` and ``on_encoded`` do."""
        self._times = Counter(block.digest for block in blocks)
        self._blocks = {block.digest: block for block in reversed(blocks)}
        self._keys = self.recipe.shard_keys(self._blocks)
        self.cache.needs.need(list(self._keys.values()))
        missing = self._look_up(self._blocks)
        self.report.tell("encoding", force=True)
        if missing:
            self.tally.encoding_since = time.monotonic()
            note_recipe(self.recipe, self.cache.index)
        while missing:
            self._encode(missing)
            missing = self._look_up(self._suspects())

    def leave(self) -> None:
        """Let other jobs make what this one has not."""
        self.cache.flights.leave(self)

    def told(self) -> list[Miss]:
        """Return the misses with what changed."""
        return self._misses.told(self._changes, MISSES_TOLD)

    def _look_up(self, digests: Iterable[str]) -> list[Block]:
        """Take what is in the store; return the other blocks, in the order to do them."""
        self._landings = self.cache.flights.landings(self)
        self.failed = failed_parts(self.recipe, self.cache.index)
        found = self._ask(digests)
        for digest, stored in found.hits.items():
            self._take(digest, stored)
            self.tally.hits += self._times[digest]
            self._hits.add(digest)
        self._whys |= found.misses
        self._changes |= found.changes
        return sorted((self._blocks[digest] for digest in found.misses), key=_order)

    def _ask(self, digests: Iterable[str]) -> Lookup:
        blocks = {digest: self._blocks[digest] for digest in digests}
        return look_up_blocks(blocks, self.recipe, self.cache.store, self.cache.index, self.failed)

    def _take(self, digest: str, stored: ReceiptFile) -> None:
        self.receipts[digest], self._made_by[digest] = stored.receipt, stored.made_by
        self.tally.add(stored.receipt, self._blocks[digest].length, self._times[digest])

    def _suspects(self) -> list[str]:
        """Give back what was made by a part that an audit has found wrong meanwhile."""
        failed = failed_parts(self.recipe, self.cache.index)
        found = [digest for digest, made_by in self._made_by.items() if suspect(made_by, failed)]
        for digest in found:
            receipt = self.receipts.pop(digest)
            del self._made_by[digest]
            self.tally.add(receipt, self._blocks[digest].length, -self._times[digest])
            if digest in self._hits:
                self._hits.discard(digest)
                self.tally.hits -= self._times[digest]
        return found

    def _encode(self, missing: list[Block]) -> None:
        """Have the workers make what is missing; what another job makes is waited for and taken from the store."""
        queue = deque(_tasks(missing))
        while queue or self._others:
            for results in self.crew.results(queue, self._begin):
                self._finish(results)
                queue.extend(self._landed())
                self.report.tell("encoding")
            if self._others:
                self.crew.check_cancelled()
                self.cache.flights.wait(TICK_SECONDS)
                queue.extend(self._landed())

    def _begin(self, group: list[Block]) -> Task | None:
        """Start the task of a group, without the blocks that another job makes and those that have come meanwhile."""
        mine = [block for block in group if self._claim(block)]
        # Another job may have landed them since they were looked up, or a worker that died has written them.
        landed = self.cache.flights.landings(self) != self._landings
        late = [block for block in mine if landed or block.digest in self._begun]
        came = self._came([block.digest for block in late]) if late else set()
        group[:] = [block for block in mine if block.digest not in came]
        self._begun |= {block.digest for block in group}
        if not group:
            return None
        return self.crew.executor.submit(
            encode_blocks, self.cache.store, self.recipe, list(group), fast=not self.failed
        )

    def _claim(self, block: Block) -> bool:
        mine = self.cache.flights.claim(self._keys[block.digest], self)
        if not mine:
            self._others[block.digest] = block
        return mine

    def _landed(self) -> list[list[Block]]:
        """Return tasks for the blocks that no other job makes any more: they are there now, or it has failed."""
        free = [block for block in self._others.values() if self.cache.flights.claim(self._keys[block.digest], self)]
        for block in free:
            del self._others[block.digest]
            self._begun.add(block.digest)
        return _tasks(free)

    def _came(self, digests: list[str]) -> set[str]:
        """Take those blocks that are in the store by now; return them."""
        self.cache.needs.need([self._keys[digest] for digest in digests])
        found = self._ask(digests)
        for digest, stored in found.hits.items():
            self._take(digest, stored)
            self.tally.hits += self._times[digest]
            self.tally.shared += self._times[digest]
            self._hits.add(digest)
        self.cache.flights.land([self._keys[digest] for digest in found.hits], self)
        return set(found.hits)

    def _finish(self, results: list[Done]) -> None:
        """Count what a task has made, and tell whom it concerns."""
        if not results:
            return
        index, blocks = self.cache.index, [done.block for done in results]
        self.cache.needs.made(
            {done.receipt.key: done.receipt.data.bytes + done.receipt.meta.bytes for done in results},
            self.recipe.digest,
        )
        note_seen([block.digest for block in blocks], self.recipe, index)
        note_files(blocks, index)
        failed = {part for done in results for part in done.failed} - self.failed
        if failed:
            note_audit_failed(self.recipe, failed, index)
            self.tally.fallbacks["audit"] += not self.failed
            self.failed |= failed
        for done in results:
            self._take(done.block.digest, ReceiptFile(done.receipt, made_by=done.made_by))
            why, times = self._whys[done.block.digest], self._times[done.block.digest]
            self.tally.misses[why.reason] += times
            self._misses.add(why, times, done.block.length)
            self.tally.add_work(done)
        self.cache.flights.land([done.receipt.key for done in results], self)
        for done in results:
            self.on_encoded(done)


def _tasks(blocks: list[Block]) -> list[list[Block]]:
    return grouped(blocks, attrgetter("length"), most_bytes=TASK_BYTES, most_items=TASK_BLOCKS)


def _order(block: Block) -> tuple[Any, ...]:
    """Sort plain blocks heaviest first; before them those of other sources, in the order in which they are unpacked."""
    packed = block.how != "lines"
    return (0, block.source, block.part, block.offset) if packed else (1, -block.length, block.digest)
