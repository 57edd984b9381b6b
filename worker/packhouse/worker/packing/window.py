"""A window of the strategy balanced: packs that have their leaders, and the samples to fill them with."""

import numpy as np

from packhouse.worker.packing.compiled import compiled
from packhouse.worker.packing.segments import Ids, Int32, Int64

TRIES = 24
"""Groups that are tried for a sample of middle length before it is left for the next window."""
CLOSINGS = 4
"""Samples that are tried to bring a pack to where one or two others fill it to the last token."""


@compiled
def fill_window(lengths: Int32, leaders: Ids, window: Ids, pack_length: int, ranks: int, most: int) -> Int32:
    """Return the pack of each sample of ``window``, int32, or -1 for those that are left over.

    Pack i has ``leaders[i]``; each ``ranks`` packs are a group. No pack gets more than ``most`` samples.
    """
    packs = len(leaders)
    room, square, held = np.empty(packs, np.int64), np.empty(packs, np.int64), np.ones(packs, np.int64)
    tokens = np.int64(0)
    for i in range(packs):
        n = np.int64(lengths[leaders[i]])
        room[i], square[i] = pack_length - n, n * n
        tokens += n
    by_length = np.empty(len(window), np.int64)
    for i in range(len(window)):
        n = np.int64(lengths[window[i]])
        by_length[i] = ((pack_length - n) << 32) | i
        tokens += n
    by_length.sort()
    pack_of = np.full(len(window), -1, np.int32)
    # The short samples hold a tenth of the window's tokens.
    middle, short = len(window), np.int64(0)
    while middle > 0:
        short += pack_length - (by_length[middle - 1] >> 32)
        if short > tokens // 10:
            break
        middle -= 1
    _spread(by_length[:middle], pack_length, ranks, most, room, square, held, pack_of)
    if middle < len(window):
        _close(by_length[middle:], pack_length, most, room, held, pack_of)
    return pack_of


@compiled
def _spread(
    by_length: Int64, pack_length: int, ranks: int, most: int, room: Int64, square: Int64, held: Int64, pack_of: Int32
) -> None:
    """Put samples of middle length, longest first, where there is most room and least cost."""
    groups = len(room) // ranks
    free = np.zeros(groups, np.int64)
    for pack in range(len(room)):
        free[pack // ranks] += room[pack]
    tried = np.zeros(groups, np.bool_)
    for key in by_length:
        n, item = pack_length - (key >> 32), key & 0xFFFFFFFF
        tried[:] = False
        for _ in range(min(groups, TRIES)):
            group = -1
            for g in range(groups):
                if not tried[g] and (group < 0 or free[g] > free[group]):
                    group = g
            if free[group] < n:
                break
            tried[group] = True
            best = -1
            for pack in range(group * ranks, group * ranks + ranks):
                if room[pack] >= n and held[pack] < most and (best < 0 or square[pack] < square[best]):
                    best = pack
            if best >= 0:
                pack_of[item] = best
                room[best] -= n
                square[best] += n * n
                held[best] += 1
                free[group] -= n
                break


@compiled
def _close(by_length: Int64, pack_length: int, most: int, room: Int64, held: Int64, pack_of: Int32) -> None:
    """Fill packs with short samples: as they come while there is room for two of any, then to the last token."""
    longest = pack_length - (by_length[0] >> 32)
    count, head = np.zeros(longest + 1, np.int64), np.full(longest + 1, -1, np.int64)
    after = np.full(len(by_length), -1, np.int64)
    for i in range(len(by_length) - 1, -1, -1):
        n = pack_length - (by_length[i] >> 32)
        after[i], head[n] = head[n], i
        count[n] += 1
    as_they_come = np.argsort(by_length & 0xFFFFFFFF)
    at = 0
    for pack in np.argsort(-room, kind="mergesort"):
        while room[pack] > 2 * longest and at < len(by_length) and held[pack] < most:
            n = pack_length - (by_length[as_they_come[at]] >> 32)
            at += 1
            if count[n] > 0:
                _take(n, pack, by_length, count, head, after, room, held, pack_of)
        for attempt in range(CLOSINGS):
            if room[pack] <= 0 or held[pack] >= most:
                break
            if _exact(pack, longest, most, by_length, count, head, after, room, held, pack_of):
                break
            n = _longest_below(count, _wanted(room[pack], longest, attempt), min(room[pack], longest))
            if n == 0:
                break
            _take(n, pack, by_length, count, head, after, room, held, pack_of)


@compiled
def _wanted(room: int, longest: int, attempt: int) -> int:
    """Return how long a sample to take next: at first a third of the room, which leaves two about as long to find."""
    return min(room // 3 + 1, longest) if attempt == 0 and room > 3 else min(room, longest)


@compiled
def _longest_below(count: Int64, wanted: int, bound: int) -> int:
    """Return the greatest length up to ``wanted`` that is there, else up to ``bound``, else 0."""
    for n in range(wanted, 0, -1):
        if count[n] > 0:
            return n
    for n in range(bound, wanted, -1):
        if count[n] > 0:
            return n
    return 0


@compiled
def _exact(
    pack: int,
    longest: int,
    most: int,
    by_length: Int64,
    count: Int64,
    head: Int64,
    after: Int64,
    room: Int64,
    held: Int64,
    pack_of: Int32,
) -> bool:
    """Fill the pack to the last token with one sample or two, and return whether that was possible."""
    gap = room[pack]
    if gap <= longest and count[gap] > 0:
        _take(gap, pack, by_length, count, head, after, room, held, pack_of)
        return True
    if held[pack] + 2 > most:
        return False
    for n in range(min(gap - 1, longest), (gap - 1) // 2, -1):
        other = gap - n
        if count[n] > 0 and count[other] > (n == other):
            _take(n, pack, by_length, count, head, after, room, held, pack_of)
            _take(other, pack, by_length, count, head, after, room, held, pack_of)
            return True
    return False


@compiled
def _take(
    n: int,
    pack: int,
    by_length: Int64,
    count: Int64,
    head: Int64,
    after: Int64,
    room: Int64,
    held: Int64,
    pack_of: Int32,
) -> None:
    """Move the first sample of ``n`` tokens into the pack."""
    i = head[n]
    head[n] = after[i]
    count[n] -= 1
    pack_of[by_length[i] & 0xFFFFFFFF] = pack
    room[pack] -= n
    held[pack] += 1
