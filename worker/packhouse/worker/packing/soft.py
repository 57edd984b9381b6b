"""Strategy soft: next-fit in shuffled order, each pack filled up from a buffer of the samples that come next.

Source: XTuner's soft packing, as its documentation and behaviour describe it: the order is cut into chunks that are
packed on their own; a chunk is read from its end; before a sample that does not fit opens the next pack, the pack takes
the shortest of the samples that come next for as long as they fit. Equal to XTuner's packs for the same permutation.
"""

import numpy as np

from packhouse.worker.packing.compiled import compiled
from packhouse.worker.packing.segments import Ids, Int32, Int64, Packing


def soft(
    lengths: Int32,
    order: Ids,
    pack_length: int,
    chunk_size: int = 10_000,
    extra_buffer: int = 100,
    max_segments: int | None = None,
) -> Packing:
    """Return the packs of the samples ``order``, none of which is longer than ``pack_length``. Empty ones are left out.

    ``chunk_size`` samples are packed on their own, so each chunk may leave one short pack; ``extra_buffer`` samples
    are searched to fill a pack.
    """
    kept = order[lengths[order] > 0]
    most = max_segments or max(len(kept), 1)
    sample, offsets = _pack(lengths, kept, pack_length, chunk_size, extra_buffer, most)
    return Packing(offsets, sample)


@compiled
def _pack(
    lengths: Int32, pending: Ids, pack_length: int, chunk_size: int, extra_buffer: int, most: int
) -> tuple[Ids, Int64]:
    sample, offsets = np.empty_like(pending), np.zeros(len(pending) + 1, np.int64)
    segment, pack, room = 0, 0, pack_length
    for first in range(0, len(pending), chunk_size):
        left = min(first + chunk_size, len(pending))
        while left > first:
            item = pending[left - 1]
            slots = most - (segment - offsets[pack])
            if lengths[item] > room or slots == 0:
                begin = max(first, left - 1 - extra_buffer)
                taken = _fill(lengths, pending[begin : left - 1], sample[segment:], room, slots)
                segment += taken
                left -= taken
                # The sample that did not fit stays behind those that were left over.
                pending[left - 1] = item
                pack += 1
                offsets[pack] = segment
                room = pack_length
            sample[segment] = item
            segment += 1
            room -= lengths[item]
            left -= 1
        if segment > offsets[pack]:
            pack += 1
            offsets[pack] = segment
            room = pack_length
    return sample, offsets[: pack + 1]


@compiled
def _fill(lengths: Int32, buffer: Ids, to: Ids, room: int, slots: int) -> int:
    """Move the shortest of ``buffer`` to ``to`` while they fit, close the gaps, and return how many were moved."""
    if room == 0 or slots == 0:
        return 0
    sizes = lengths[buffer]
    by_size = np.argsort(sizes, kind="mergesort")
    taken = 0
    gone = np.zeros(len(buffer), np.bool_)
    for i in by_size:
        if sizes[i] > room or taken == slots:
            break
        room -= sizes[i]
        to[taken] = buffer[i]
        taken += 1
        gone[i] = True
    kept = 0
    for i in range(len(buffer)):
        if not gone[i]:
            buffer[kept] = buffer[i]
            kept += 1
    return taken
