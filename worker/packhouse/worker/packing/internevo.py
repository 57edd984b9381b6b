"""Strategy internevo: concatenate the samples, cut the stream into packs, and split what is in a pack at seq_len.

Source: InternEvo's ``build_pack`` as its documentation shows it; the last pack is kept and padded, where the code
leaves it out.
"""

import numpy as np

from packhouse.worker.packing.compiled import compiled
from packhouse.worker.packing.segments import Int32, Int64, Packing


def internevo(lengths: Int32 | Int64, pack_length: int, seq_len: int) -> Packing:
    """Return the packs of samples of ``lengths`` tokens (int32 or int64) in the order given.

    Every pack but the last is full. A sample that a pack's end or ``seq_len`` cuts goes on in a segment of its own.
    Empty samples get no segment.
    """
    tokens = int(lengths.sum(dtype=np.int64))
    packs = -(-tokens // pack_length)
    # Each sample, each pack border and each seq_len of a stretch ends at most one segment.
    bound = len(lengths) + packs + tokens // seq_len
    return Packing(*_cut(lengths, pack_length, seq_len, packs, bound))


@compiled
def _cut(
    lengths: Int32 | Int64, pack_length: int, seq_len: int, packs: int, bound: int
) -> tuple[Int64, Int64, Int32, Int32]:
    offsets = np.zeros(packs + 1, np.int64)
    sample, start, length = np.empty(bound, np.int64), np.empty(bound, np.int32), np.empty(bound, np.int32)
    pack, room, segment = 0, pack_length, 0
    for i in range(len(lengths)):
        done = 0
        while done < lengths[i]:
            n = min(lengths[i] - done, room, seq_len)
            sample[segment], start[segment], length[segment] = i, done, n
            segment += 1
            done += n
            room -= n
            if room == 0:
                pack += 1
                offsets[pack] = segment
                room = pack_length
    offsets[packs] = segment
    return offsets, sample[:segment], start[:segment], length[:segment]
