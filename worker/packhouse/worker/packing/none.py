"""Strategy none: each sample is a pack of its own."""

import numpy as np

from packhouse.worker.packing.kept import with_tokens
from packhouse.worker.packing.segments import Ids, Int32, Packing, narrow


def none(lengths: Int32, order: Ids) -> Packing:
    """Return one pack for each sample of ``order`` that has tokens, in that order."""
    kept = with_tokens(lengths, order)
    return Packing(np.arange(len(kept) + 1, dtype=narrow(len(kept) + 2)), kept)
