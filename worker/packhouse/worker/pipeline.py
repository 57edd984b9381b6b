"""A caching job: look up every block, encode what is missing, write the manifest.

The dataset does not depend on what ran where or ended when: its shards stand in source order.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, TypeVar

from packhouse.client.errors import InvalidRequest, PackhouseError, Unavailable
from packhouse.client.format import Manifest, Receipt, manifest_path
from packhouse.client.store import Store
from packhouse.client.wire import JobSpec, Progress
from packhouse.worker.executor import Executor, Task, WorkerDied
from packhouse.worker.grouping import grouped
from packhouse.worker.lookup import (
    Index,
    audit_failed,
    miss_reasons,
    note_audit_failed,
    note_seen,
    remember_blocks,
    remembered_blocks,
)
from packhouse.worker.recipe import ResolvedRecipe
from packhouse.worker.records import Reject
from packhouse.worker.shards import find_shard, read_rejects
from packhouse.worker.sources import Block, Fingerprint, expand
from packhouse.worker.tally import Tally
from packhouse.worker.work import Done, Scanned, at_line, encode_blocks, scan_sources

__all__ = ["BadRecords", "Cancelled", "Executor", "Outcome", "run"]

TASK_BYTES = 8 << 20
"""Small blocks go to a worker together, up to so many bytes."""
TASK_BLOCKS = 64
"""And up to so many blocks."""
SCAN_BYTES, SCAN_FILES = 128 << 20, 256
"""The same for files to scan."""
TASKS_PER_CPU = 2
"""Tasks in flight: one that runs, and one that waits so that no worker does."""
ATTEMPTS = 3
"""Workers that a block may cost before its job fails."""
TICK_SECONDS = 0.25


Piece = TypeVar("Piece", Block, Fingerprint)


class Cancelled(Exception):
    """The job was asked to stop, and has."""


class BadRecords(InvalidRequest):
    """More records cannot be used than the job allows."""

    kind = "bad-records"
    blocks: Sequence[dict[str, Any]] = ()
    """As in ``Outcome``: those that are done, so that the records can be found."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a job leaves behind: the dataset, and where each of its blocks stands in its source."""

    dataset_id: str
    blocks: list[dict[str, Any]]
    """Source, offset, length, first_line and lines of each, the key of its shard, and how many records it rejected."""


def run(
    spec: JobSpec,
    resolved: ResolvedRecipe,
    *,
    store: Store,
    index: Index,
    executor: Executor,
    on_progress: Callable[[Progress], None],
    cancelled: threading.Event,
) -> Outcome:
    """Do a caching job and return its outcome.

    Raises ``Cancelled`` once ``cancelled`` is set, and ``PackhouseError`` for what makes the job fail: a source that
    cannot be read or changes, too many bad records, a store that cannot be written, a block that kills its workers.
    Whatever shards are finished stay, as hits for the next job.
    """
    return _Run(spec, resolved, store, index, executor, on_progress, cancelled).run()


class _Run:
    """The state of one job while it runs."""

    def __init__(
        self,
        spec: JobSpec,
        resolved: ResolvedRecipe,
        store: Store,
        index: Index,
        executor: Executor,
        on_progress: Callable[[Progress], None],
        cancelled: threading.Event,
    ) -> None:
        self.spec, self.resolved, self.recipe = spec, resolved, resolved.recipe_
        self.store, self.index, self.executor = store, index, executor
        self.on_progress, self.cancelled = on_progress, cancelled
        self.tally = Tally()
        self.receipts: dict[str, Receipt] = {}
        """By block digest."""
        self.running: dict[Task, Any] = {}
        """What each task under way works on."""
        self.fast = not audit_failed(self.recipe, index)
        self.deaths = 0
        """Workers that died."""
        self._phase = "scanning"
        self._told = 0.0

    def run(self) -> Outcome:
        """Scan, look up, encode, commit."""
        try:
            blocks = self._blocks(expand(self.spec.sources))
            self.tally.blocks = len(blocks)
            self.tally.bytes = sum(block.length for block in blocks)
            self._encode(self._look_up(blocks), Counter(block.digest for block in blocks))
            self._judge(blocks)
            return self._commit(blocks)
        except BadRecords as error:
            error.blocks = self._places(blocks)
            raise
        finally:
            if self.executor.cancel(list(self.running)) or self.deaths:
                self.store_sweep()
            self._tell(self._phase, force=True)

    def _tell(self, phase: str, *, force: bool = False) -> None:
        now = time.monotonic()
        self._phase = phase
        if force or now - self._told >= TICK_SECONDS:
            self._told = now
            self.on_progress(self.tally.progress(phase))

    def _check_cancelled(self) -> None:
        if self.cancelled.is_set():
            raise Cancelled

    def _blocks(self, files: list[str]) -> list[Block]:
        """Return the blocks of all sources, in order; scan those that are not remembered."""
        self.tally.sources = len(files)
        self._tell("scanning", force=True)
        fingerprints = {file: Fingerprint.of(file, self.spec.documents) for file in files}
        found = remembered_blocks(list(fingerprints.values()), self.index)
        unknown = [fingerprint for file, fingerprint in fingerprints.items() if file not in found]
        queue = grouped(unknown, attrgetter("size"), most_bytes=SCAN_BYTES, most_items=SCAN_FILES)
        attempts: Counter[str] = Counter()
        while queue or self.running:
            self._check_cancelled()
            while queue and len(self.running) < TASKS_PER_CPU * self.executor.cpus:
                group = queue.pop(0)
                self.running[self.executor.submit(scan_sources, [file.path for file in group], self.spec.documents)] = (
                    group
                )
            for task in self.executor.wait(list(self.running), TICK_SECONDS):
                group = self.running.pop(task)
                try:
                    scanned: list[Scanned] = self.executor.result(task)
                except WorkerDied as error:
                    queue[:0] = self._again(group, attempts, error)
                    continue
                remember_blocks(scanned, self.index)
                found |= {source.fingerprint.path: source.blocks for source in scanned}
                self.tally.bytes_read += sum(source.fingerprint.size for source in scanned)
            self._tell("scanning")
        return [block for file in files for block in found[file]]

    def _look_up(self, blocks: list[Block]) -> list[Block]:
        """Take what is in the store; return one block for each missing shard, in the order to do them."""
        missing: dict[str, Block] = {}
        damaged: set[str] = set()
        hits: Counter[str] = Counter()
        for block in blocks:
            digest = block.digest
            if digest not in self.receipts and digest not in missing:
                receipt, why = find_shard(self.store, self.recipe.shard_key(digest))
                if receipt is None:
                    missing[digest] = block
                    damaged.update([digest] if why == "damaged" else [])
                else:
                    self.receipts[digest] = receipt
            if digest in self.receipts:
                self.tally.hits += 1
                self.tally.add(self.receipts[digest], block.length)
            else:
                hits[digest] += 1
        reasons = miss_reasons(list(missing), self.recipe, self.index)
        for digest, count in hits.items():
            self.tally.misses["damaged" if digest in damaged else reasons[digest]] += count
        return sorted(missing.values(), key=_order)

    def _encode(self, missing: list[Block], times: Counter[str]) -> None:
        """Encode blocks on the workers; each is tried again when its worker dies."""
        if missing:
            self.tally.encoding_since = time.monotonic()
        self._tell("encoding", force=True)
        queue = _tasks(missing)
        attempts: Counter[str] = Counter()
        finished: list[Done] = []
        while queue or self.running:
            self._check_cancelled()
            while queue and len(self.running) < TASKS_PER_CPU * self.executor.cpus:
                group = queue.pop(0)
                task = self.executor.submit(encode_blocks, self.store, self.recipe, group, fast=self.fast)
                self.running[task] = group
            for task in self.executor.wait(list(self.running), TICK_SECONDS):
                group = self.running.pop(task)
                try:
                    results: list[Done] = self.executor.result(task)
                except WorkerDied as error:
                    queue[:0] = self._again(group, attempts, error)
                    continue
                self._finish(results, times)
                finished += [done for done in results if done.fast]
                failed = {part for done in results for part in done.failed}
                if failed and self.fast:
                    self._distrust(failed)
                if not self.fast and finished:  # also what was under way when an audit failed
                    queue[:0] = self._undo(finished, times)
                    finished = []
            self._tell("encoding")

    def _again(self, group: list[Piece], attempts: Counter[str], error: WorkerDied) -> list[list[Piece]]:
        """Return the tasks that retry ``group``, one a piece, so that a deadly one is found."""
        self.deaths += 1
        for piece in group:
            attempts[str(piece)] += 1
            if attempts[str(piece)] >= ATTEMPTS and len(group) == 1:
                remedy = "look for a huge or odd record there, or give the workers more memory"
                raise Unavailable(f"{ATTEMPTS} workers died on {piece} ({error})", remedy)
        self.store_sweep()
        return [[piece] for piece in group]

    def store_sweep(self) -> None:
        """Remove what dead workers were writing, where the store can tell."""
        sweep = getattr(self.store, "sweep", None)
        if sweep is not None:
            sweep()

    def _distrust(self, failed: set[str]) -> None:
        """An audit failed: what is proven slow takes over."""
        self.fast = False
        note_audit_failed(self.recipe, failed, self.index)
        self.tally.fallbacks["audit"] += 1

    def _undo(self, finished: list[Done], times: Counter[str]) -> list[list[Block]]:
        """Return the tasks that encode anew what this job has encoded the fast way."""
        for done in finished:
            receipt = self.receipts.pop(done.block.digest)
            self.tally.add(receipt, done.block.length, -times[done.block.digest])
        return _tasks([done.block for done in finished])

    def _finish(self, results: list[Done], times: Counter[str]) -> None:
        for done in results:
            digest = done.block.digest
            if digest not in self.receipts:
                self.tally.add(done.receipt, done.block.length, times[digest])
            self.receipts[digest] = done.receipt
            self.tally.add_work(done)
            if done.rejects and self.spec.on_bad_record == "fail":
                raise self._bad_record(done.block, done.rejects[0])
        note_seen([done.block.digest for done in results], self.recipe, self.index)

    def _judge(self, blocks: list[Block]) -> None:
        """Fail the job when more records are bad than it allows."""
        bad, total = sum(self.tally.rejected.values()), self.tally.records
        if not bad:
            return
        block, first = next(
            (block, Reject(**reject))
            for block in blocks
            if self.receipts[block.digest].rejected
            for reject in read_rejects(self.store, self.receipts[block.digest].key)[:1]
        )
        if self.spec.on_bad_record == "fail":
            raise self._bad_record(block, first)
        if bad > self.spec.max_bad_share * total:
            reasons = ", ".join(f"{name} {count:,}" for name, count in self.tally.rejected.most_common())
            place = at_line(block, first)
            raise BadRecords(
                f"{bad:,} of {total:,} records cannot be used ({reasons}), more than max_bad_share "
                f"{self.spec.max_bad_share:g}; the first is {block.source!r} line {place.row + 1}: {first.detail}",
                "mend the source, or raise max_bad_share",
            )

    def _bad_record(self, block: Block, reject: Reject) -> PackhouseError:
        detail = f"{block.source!r} line {at_line(block, reject).row + 1}: {reject.reason}, {reject.detail}"
        return BadRecords(detail, "mend the source, or set on_bad_record to 'quarantine'")

    def _commit(self, blocks: list[Block]) -> Outcome:
        """Write the manifest: the dataset is there from now on."""
        shards = tuple(self.receipts[block.digest] for block in blocks)
        manifest = Manifest(self.recipe.to_json(), self.resolved.vocab_size, shards)
        path, data = manifest_path(manifest.id), manifest.dump()
        try:
            if self.store.size(path) is None or bytes(self.store.open(path)) != data:
                self.store.write(path, data)
        except OSError as error:
            remedy = "free or repair it and submit the job again: finished shards are kept"
            raise Unavailable(f"the store cannot be written ({error.strerror})", remedy) from None
        self._phase = "done"
        return Outcome(manifest.id, self._places(blocks))

    def _places(self, blocks: list[Block]) -> list[dict[str, Any]]:
        done = [(block, self.receipts[block.digest]) for block in blocks if block.digest in self.receipts]
        return [
            asdict(block) | {"shard": receipt.key, "rejected": sum(receipt.rejected.values())}
            for block, receipt in done
        ]


def _tasks(blocks: list[Block]) -> list[list[Block]]:
    return grouped(blocks, attrgetter("length"), most_bytes=TASK_BYTES, most_items=TASK_BLOCKS)


def _order(block: Block) -> tuple[Any, ...]:
    """Sort plain blocks heaviest first; before them those of other sources, in the order in which they are unpacked."""
    packed = block.how != "lines"
    return (0, block.source, block.part, block.offset) if packed else (1, -block.length, block.digest)
