"""Strategy soft: next-fit in shuffled order, each pack filled up from a buffer of the samples that come next.

Source: XTuner's soft packing, as its documentation and behaviour describe it: the order is cut into chunks that are
packed on their own; a chunk is read from its end; before a sample that does not fit opens the next pack, the pack takes
the shortest of the samples that come next for as long as they fit. Equal to XTuner's packs for the same permutation.
"""

import heapq

import numpy as np

from packhouse.worker.packing.compiled import compiled
from packhouse.worker.packing.kept import with_tokens
from packhouse.worker.packing.segments import Ids, Int32, Packing, narrow


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
    kept = with_tokens(lengths, order)
    most = max_segments or max(len(kept), 1)
    sample, offsets = np.empty_like(kept), np.empty(len(kept) + 1, narrow(len(kept) + 2))
    packs = _pack(lengths, kept, pack_length, chunk_size, extra_buffer, most, sample, offsets)
    return Packing(offsets[: packs + 1], sample)


@compiled
def _pack(
    lengths: Int32,
    pending: Ids,
    pack_length: int,
    chunk_size: int,
    extra_buffer: int,
    most: int,
    sample: Ids,
    offsets: Ids,
) -> int:
    """Write the packs' samples and offsets, and return how many packs there are."""
    segment, pack = 0, 0
    offsets[0] = 0
    for first in range(0, len(pending), chunk_size):
        chunk = pending[first : first + chunk_size]
        gone = np.zeros(len(chunk), np.bool_)
        # The buffer holds what is left from ``low`` on, ``held`` samples; a heap tells the shortest, and of those of
        # one length the one that would come last. What was taken from the chunk's end is dropped when it comes up.
        buffer, low, held = [np.int64(0)][:0], len(chunk), 0
        room = pack_length
        for at in range(len(chunk) - 1, -1, -1):
            if gone[at]:
                continue
            gone[at] = True
            if at < low:
                low = at
            else:
                held -= 1
            slots = most - (segment - offsets[pack])
            if lengths[chunk[at]] > room or slots == 0:
                while held < extra_buffer and low > 0 and room > 0 and slots > 0:
                    low -= 1
                    heapq.heappush(buffer, (np.int64(lengths[chunk[low]]) << 32) | low)
                    held += 1
                while slots > 0 and buffer and buffer[0] >> 32 <= room:
                    other = heapq.heappop(buffer) & 0xFFFFFFFF
                    if not gone[other]:
                        gone[other] = True
                        held -= 1
                        sample[segment] = chunk[other]
                        room -= lengths[chunk[other]]
                        segment += 1
                        slots -= 1
                pack += 1
                offsets[pack] = segment
                room = pack_length
                if len(buffer) > 2 * extra_buffer + 64:
                    buffer = [key for key in buffer if not gone[key & 0xFFFFFFFF]]
                    heapq.heapify(buffer)
            sample[segment] = chunk[at]
            segment += 1
            room -= lengths[chunk[at]]
        if segment > offsets[pack]:
            pack += 1
            offsets[pack] = segment
    return pack
