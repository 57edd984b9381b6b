"""Strategy hard: concatenate the samples and cut the stream into packs; a cut sample goes on in the next pack."""

import numpy as np

from packhouse.worker.packing.compiled import compiled
from packhouse.worker.packing.segments import Ids, Int32, Packing, narrow
from packhouse.worker.packing.stretches import Stretches


def hard(
    lengths: Int32, order: Ids, pack_length: int, max_segments: int | None = None, longest: int | None = None
) -> Packing:
    """Return the packs of the samples ``order``, end to end. Empty samples get no segment.

    Every pack but the last is full, unless ``max_segments`` ends it. A sample that a pack's end cuts goes on in the
    next pack; nothing is dropped. ``longest`` is the most tokens of a segment.
    """
    most, longest = max_segments or pack_length, longest or pack_length
    packs, segments = _sizes(lengths, order, pack_length, longest, most)
    offsets, begin = np.zeros(packs + 1, narrow(segments + 1)), np.zeros(packs, np.int32)
    sample = np.empty(segments, order.dtype)
    _cut(lengths, order, pack_length, longest, most, offsets, sample, begin)
    return Packing(offsets, sample, stretches=Stretches(begin, pack_length, longest))


@compiled
def _sizes(lengths: Int32, order: Ids, pack_length: int, longest: int, most: int) -> tuple[int, int]:
    """Return the number of packs and of segments."""
    packs, segments, room, held = 0, 0, 0, 0
    for sample in order:
        left = int(lengths[sample])
        while left > 0:
            if room == 0 or held == most:
                packs += 1
                room, held = pack_length, 0
            n = min(left, room, longest)
            segments += 1
            held += 1
            left -= n
            room -= n
    return packs, segments


@compiled
def _cut(
    lengths: Int32, order: Ids, pack_length: int, longest: int, most: int, offsets: Ids, sample: Ids, begin: Int32
) -> None:
    pack, segment, room, held = 0, 0, 0, 0
    for i in order:
        done = 0
        while done < lengths[i]:
            if room == 0 or held == most:
                offsets[pack], begin[pack] = segment, done
                pack += 1
                room, held = pack_length, 0
            n = min(int(lengths[i]) - done, room, longest)
            sample[segment] = i
            segment += 1
            held += 1
            done += n
            room -= n
    offsets[pack] = segment
