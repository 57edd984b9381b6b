"""Samples that have tokens; strategies leave the others out."""

import numpy as np

from packhouse.worker.packing.compiled import compiled
from packhouse.worker.packing.segments import Ids, Int32


def with_tokens(lengths: Int32, order: Ids) -> Ids:
    """Return the samples ``order`` that have tokens: ``order`` itself where all do."""
    count = _count(lengths, order)
    return order if count == len(order) else _kept(lengths, order, count)


@compiled
def _count(lengths: Int32, order: Ids) -> int:
    count = 0
    for sample in order:
        count += lengths[sample] > 0
    return count


@compiled
def _kept(lengths: Int32, order: Ids, count: int) -> Ids:
    kept, at = np.empty(count, order.dtype), 0
    for sample in order:
        if lengths[sample] > 0:
            kept[at] = sample
            at += 1
    return kept
