"""Strategy internevo_unpacked: so many samples a pack, in order, whatever their lengths; the rest is padding.

Source: InternEvo's ``build_unpack`` as its documentation shows it. What is longer than ``seq_len`` was cut before, by
the overlong policy, so that a cut is a number in the report; the last pack is kept, where the code may lose it.
"""

import numpy as np

from packhouse.worker.packing.kept import with_tokens
from packhouse.worker.packing.segments import Ids, Int32, Packing, narrow


def internevo_unpacked(lengths: Int32, order: Ids, per_pack: int) -> Packing:
    """Return packs of ``per_pack`` samples of ``order``, the last one of the rest. Empty samples are left out."""
    kept = with_tokens(lengths, order)
    offsets = np.arange(-(-len(kept) // per_pack) + 1, dtype=narrow(len(kept) + per_pack))
    np.multiply(offsets, per_pack, out=offsets)
    offsets[-1] = len(kept)
    return Packing(offsets, kept)
