"""A plan's packs, part by part: cut out of the packing, measured, and written, one part ahead of the next."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from packhouse.client.digest import digest_bytes
from packhouse.client.format import FileInfo
from packhouse.client.pack_table import PackTable, encode_part
from packhouse.client.plan import part_path
from packhouse.client.store import Store
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.packing.measure import Measures
from packhouse.worker.packing.segments import Int32, Packing, costs

PART_SEGMENTS = 1 << 19
"""Segments of a part, about; a step is never cut."""


def steps_per_part(packing: Packing, spec: PlanSpec) -> int:
    """Return how many steps a part holds."""
    steps = packing.packs // (spec.ranks * spec.micro_batches)
    return max(1, min(steps, steps * PART_SEGMENTS // max(1, len(packing.sample))))


def write_parts(
    store: Store | None, plan_id: str, packing: Packing, lengths: Int32, measures: Measures
) -> tuple[FileInfo, ...]:
    """Measure the packs, write them where there is a store, and return what was written.

    ``lengths`` are the samples' tokens; ``measures`` takes in all packs. Writing goes on while the next part is cut.
    """
    files: list[FileInfo] = []
    with ThreadPoolExecutor(1) as writer:
        pending: Future[FileInfo] | None = None
        for number, table in enumerate(_tables(packing, lengths, measures.spec)):
            if pending is not None:
                files.append(pending.result())
            if store is not None:
                pending = writer.submit(_write, store, part_path(plan_id, number), table)
            measures.add(table, cut=packing.cutting)
        if pending is not None:
            files.append(pending.result())
    return tuple(files)


def _tables(packing: Packing, lengths: Int32, spec: PlanSpec) -> Iterator[PackTable]:
    height = steps_per_part(packing, spec) * spec.ranks * spec.micro_batches
    for first in range(0, packing.packs, height):
        last = min(first + height, packing.packs)
        offsets = packing.offsets[first : last + 1].astype(np.int64) - packing.offsets[first]
        sample, start, length = packing.cuts(lengths, first, last)
        tokens, cost = costs(Packing(offsets, sample, start, length), lengths, spec.cost.token, spec.cost.square)
        yield PackTable(offsets, sample, start, length, tokens, cost)


def _write(store: Store, path: str, table: PackTable) -> FileInfo:
    batch = encode_part(table)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as file:
        file.write_batch(batch)
    data = sink.getvalue()
    store.write(path, data)
    return FileInfo(data.size, digest_bytes(data))
