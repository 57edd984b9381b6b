"""A caching job: find the blocks of its sources, have a shard of each, write the manifest.

The dataset does not depend on what ran where or ended when: its shards stand in source order.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from packhouse.client.format import Manifest, Receipt, manifest_path
from packhouse.client.store import Store
from packhouse.client.wire import JobSpec, Progress
from packhouse.worker.attached import attach
from packhouse.worker.crew import Cancelled, Crew
from packhouse.worker.encoding import Cache, Encoding
from packhouse.worker.executor import Executor
from packhouse.worker.flights import Flights
from packhouse.worker.judging import BadRecords, judge, judge_block
from packhouse.worker.lookup import Index, Needs, NoEviction
from packhouse.worker.recipe import ResolvedRecipe
from packhouse.worker.scanning import find_blocks
from packhouse.worker.shards import check_there
from packhouse.worker.sources import Block, listed
from packhouse.worker.tally import Report, Tally
from packhouse.worker.work import Done

__all__ = ["BadRecords", "Cancelled", "Executor", "Flights", "Outcome", "run"]


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
    on_encoded: Callable[[Done], None] = lambda done: None,
    needs: Needs | None = None,
    flights: Flights | None = None,
    submitter: str = "",
) -> Outcome:
    """Do a caching job and return its outcome; ``on_encoded`` is told of each block that a worker has encoded.

    ``needs`` hears which shards the job uses, and jobs that share ``flights`` make each shard once. All ``submitter``s
    get equal shares of the executor.

    Raises ``Cancelled`` once ``cancelled`` is set, and ``PackhouseError`` for what makes the job fail: a source that
    cannot be read or changes, too many bad records, a store that cannot be written, a block that kills its workers.
    Whatever shards are finished stay, as hits for the next job.
    """
    recipe, tally = resolved.recipe_, Tally()
    report, crew = Report(tally, on_progress), Crew(executor, store, cancelled, submitter, 2.0**spec.priority)
    cache = Cache(store, index, needs or NoEviction(), flights or Flights())

    def encoded(done: Done) -> None:
        on_encoded(done)
        judge_block(done, spec)

    encoding = Encoding(cache, crew, recipe, report, encoded)
    blocks: list[Block] = []
    try:
        files = listed(spec.sources)
        tally.sources = len(files)
        report.tell("scanning", force=True)
        found = find_blocks(files, spec.documents, index, crew, report)
        blocks = attach(found, recipe, spec.file_roots, store, index, crew)
        tally.blocks, tally.bytes = len(blocks), sum(block.length for block in blocks)
        encoding.make(blocks)
        check_there(store, encoding.receipts.values())
        judge(blocks, encoding.receipts, tally, spec, store)
        dataset = _commit([encoding.receipts[block.digest] for block in blocks], resolved, store)
        report.phase = "done"
        return Outcome(dataset, _places(blocks, encoding.receipts))
    except BadRecords as error:
        error.blocks = _places(blocks, encoding.receipts)
        raise
    finally:
        crew.disband()
        encoding.leave()
        tally.why = encoding.told()
        report.tell(report.phase, force=True)


def _commit(receipts: Sequence[Receipt], resolved: ResolvedRecipe, store: Store) -> str:
    """Write the manifest: the dataset is there from now on. Return its id."""
    manifest = Manifest(resolved.recipe, resolved.vocab_size, tuple(receipts))
    path, data = manifest_path(manifest.id), manifest.dump()
    if store.size(path) is None or bytes(store.open(path)) != data:
        store.write(path, data)
    return manifest.id


_PLACE = [field.name for field in fields(Block)]


def _places(blocks: Sequence[Block], receipts: Mapping[str, Receipt]) -> list[dict[str, Any]]:
    done = ((block, receipts[block.digest]) for block in blocks if block.digest in receipts)
    return [
        {name: getattr(block, name) for name in _PLACE}
        | {"shard": receipt.key, "rejected": sum(receipt.rejected.values())}
        for block, receipt in done
    ]
