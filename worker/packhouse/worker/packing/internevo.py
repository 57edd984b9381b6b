"""Strategy internevo: concatenate the samples, cut the stream into packs, and split what is in a pack at seq_len.

Source: InternEvo's ``build_pack`` as its documentation shows it; the last pack is kept and padded, where the code
leaves it out.
"""

from packhouse.worker.packing.hard import hard
from packhouse.worker.packing.segments import Ids, Int32, Packing


def internevo(lengths: Int32, order: Ids, pack_length: int, seq_len: int, max_segments: int | None = None) -> Packing:
    """Return the packs of the samples ``order``; those of ``hard``, each stretch of a sample cut every ``seq_len``."""
    return hard(lengths, order, pack_length, max_segments, seq_len)
