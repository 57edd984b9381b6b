"""Strategy internevo_unpacked: so many samples a pack, in order, whatever their lengths; the rest is padding.

Source: InternEvo's ``build_unpack`` as its documentation shows it. What is longer than ``seq_len`` was cut before, by
the overlong policy, so that a cut is a number in the report; the last pack is kept, where the code may lose it.
"""

import numpy as np

from packhouse.worker.packing.segments import Ids, Int32, Packing


def internevo_unpacked(lengths: Int32, order: Ids, per_pack: int) -> Packing:
    """Return packs of ``per_pack`` samples of ``order``, the last one of the rest. Empty samples are left out."""
    kept = order[lengths[order] > 0]
    return Packing(np.append(np.arange(0, len(kept), per_pack), len(kept)).astype(np.int64), kept)
