"""Strategy none: each sample is a pack of its own."""

import numpy as np

from packhouse.worker.packing.segments import Ids, Int32, Packing


def none(lengths: Int32, order: Ids) -> Packing:
    """Return one pack for each sample of ``order`` that has tokens, in that order."""
    kept = order[lengths[order] > 0]
    return Packing(np.arange(len(kept) + 1, dtype=np.int64), kept)
