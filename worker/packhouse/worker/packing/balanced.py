"""Strategy balanced: full packs, and equal cost over the ranks at every micro-batch.

Ranks meet at every micro-batch, and attention costs the square of a sample's length, so a rank with one long sample
keeps the others waiting. Packs are therefore made in **groups**, one pack for each rank:

1. The longest samples, one for each pack, are its **leaders**: a group takes leaders of neighbouring lengths.
2. Groups are cut into strata by length, one for each micro-batch; a step takes one group of each in shuffled order, so
   that steps stay alike, and which long samples meet in one stays random.
3. All other samples come shuffled, in windows. In a window those of middle length go, longest first, to the group with
   most room and there to the pack of least cost; the short ones then close each pack to the last token.
4. Within a step, the costliest pack of each group goes to the rank that has least so far.

What does not fill a whole step is left to the caller. All numbers are integers; nothing depends on a library's order.
Related: first-fit into balanced bins, Karmarkar and Karp's differencing, and WLB-LLM (arXiv 2503.17924), which evens
cost by packs of different length instead.
"""

from collections.abc import Callable

import numpy as np

from packhouse.worker.packing.best_fit import PACKS, histogram, place
from packhouse.worker.packing.compiled import compiled
from packhouse.worker.packing.segments import Ids, Int32, Int64, Packing
from packhouse.worker.packing.shuffle import MICRO_BATCHES, STRATA
from packhouse.worker.packing.window import fill_window

Shuffle = Callable[..., Ids]
"""(count, *key) -> the numbers below count in the order of the key."""

WINDOW = 64
"""Groups of a window, at least."""
BINS = 512
"""Packs of a window, at least: fewer leave too few short samples to close packs with."""


def balanced(
    lengths: Int32,
    order: Ids,
    pack_length: int,
    ranks: int,
    micro_batches: int,
    shuffle: Shuffle,
    max_segments: int | None = None,
) -> tuple[Packing, Ids]:
    """Return the packs of whole steps, and the samples that are left over.

    ``order`` names the samples, none longer than ``pack_length``, in shuffled order. The packs come group by group:
    ``ranks`` packs that meet at a micro-batch, ``micro_batches`` groups a step. Each pack has a sample at least.
    """
    groups = _group_count(lengths, order, pack_length, ranks, max_segments) // micro_batches * micro_batches
    if groups == 0:
        return Packing(np.zeros(1, np.int64), order[:0]), order
    leaders, rest = _leaders(lengths, order, pack_length, groups * ranks)
    rows = _group_order(groups, micro_batches, shuffle)
    leaders = leaders.reshape(groups, ranks)[rows].reshape(-1)
    window = max(WINDOW, -(-BINS // ranks))
    sample, offsets, left = _stream(lengths, leaders, rest, pack_length, ranks, window, max_segments or pack_length)
    return Packing(offsets, sample), left


def assign_ranks(cost: Int64, ranks: int, micro_batches: int) -> Int64:
    """Return the order of packs, given group by group with ``cost``, in which rank r has its packs side by side.

    Place ``(step · ranks + r) · micro_batches + m`` of the result is the pack of rank r in micro-batch m. In each step
    the groups are dealt by falling spread of cost, the costliest pack of a group to the rank that has least.
    """
    return _assign(cost, ranks, micro_batches)


def _group_count(lengths: Int32, order: Ids, pack_length: int, ranks: int, max_segments: int | None) -> int:
    """Return how many groups the samples fill: by their tokens, unless their lengths cannot be packed that well."""
    counts = histogram(lengths, order, pack_length)
    packs = int(counts @ np.arange(pack_length + 1)) // pack_length
    needed = int(place(counts, pack_length, max_segments)[:, PACKS].sum())
    return (needed if needed > packs + packs // 100 + 1 else packs) // ranks


def _group_order(groups: int, micro_batches: int, shuffle: Shuffle) -> Int64:
    """Return the groups, numbered by falling length of their leaders, in the order of the steps."""
    steps = groups // micro_batches
    strata = [m * steps + shuffle(steps, STRATA, m).astype(np.int64) for m in range(micro_batches)]
    places = np.argsort(shuffle(groups, MICRO_BATCHES)).reshape(steps, micro_batches).argsort(axis=1)
    return np.take_along_axis(np.stack(strata, axis=1), places, axis=1).reshape(-1)


@compiled
def _leaders(lengths: Int32, order: Ids, pack_length: int, count: int) -> tuple[Ids, Ids]:
    """Return the ``count`` longest samples by falling length, and the others that have tokens; ties as in ``order``."""
    at = np.zeros(pack_length + 2, np.int64)
    kept = 0
    for sample in order:
        at[lengths[sample]] += 1
        kept += lengths[sample] > 0
    total, length = 0, pack_length + 1
    while total < count:
        length -= 1
        total += at[length]
        at[length] = total - at[length]
    leaders, rest = np.empty(count, order.dtype), np.empty(kept - count, order.dtype)
    left = 0
    for sample in order:
        n = lengths[sample]
        if n >= length and at[n] < count:
            leaders[at[n]] = sample
            at[n] += 1
        elif n > 0:
            rest[left] = sample
            left += 1
    return leaders, rest


@compiled
def _stream(
    lengths: Int32, leaders: Ids, rest: Ids, pack_length: int, ranks: int, height: int, most: int
) -> tuple[Ids, Int64, Ids]:
    """Fill the packs window by window; return their samples and offsets, and the samples that are left over."""
    packs = len(leaders)
    sample, offsets = np.empty(packs + len(rest), leaders.dtype), np.zeros(packs + 1, np.int64)
    supply = np.int64(0)
    for i in rest:
        supply += lengths[i]
    room = np.int64(packs) * pack_length
    for i in leaders:
        room -= lengths[i]
    carried, at = rest[:0], 0
    for first in range(0, packs, height * ranks):
        last = min(first + height * ranks, packs)
        free = np.int64(last - first) * pack_length
        for i in leaders[first:last]:
            free -= lengths[i]
        # A little more than fits, for choice; or the window's part, where there is not enough for all.
        wanted = free + free // 100 if supply >= room else np.int64(free * (supply / room))
        for i in carried:
            wanted -= lengths[i]
        begin = at
        while at < len(rest) and (wanted > 0 or last == packs):
            wanted -= lengths[rest[at]]
            at += 1
        window = np.concatenate((carried, rest[begin:at]))
        pack_of = fill_window(lengths, leaders[first:last], window, pack_length, ranks, most)
        _emit(leaders, window, pack_of, first, last, sample, offsets)
        carried = window[pack_of < 0]
    return sample[: offsets[packs]], offsets, carried


@compiled
def _emit(leaders: Ids, window: Ids, pack_of: Int32, first: int, last: int, sample: Ids, offsets: Int64) -> None:
    """Write the packs ``first:last``: each its leader, then the samples of the window that it holds."""
    at = np.ones(last - first, np.int64)
    for pack in pack_of:
        if pack >= 0:
            at[pack] += 1
    for pack in range(first, last):
        begin = offsets[pack]
        offsets[pack + 1] = begin + at[pack - first]
        sample[begin] = leaders[pack]
        at[pack - first] = begin + 1
    for i in range(len(window)):
        pack = pack_of[i]
        if pack >= 0:
            sample[at[pack]] = window[i]
            at[pack] += 1


@compiled
def _assign(cost: Int64, ranks: int, micro_batches: int) -> Int64:
    rows = np.empty(len(cost), np.int64)
    width = ranks * micro_batches
    for first in range(0, len(cost), width):
        spread = np.empty(micro_batches, np.int64)
        for m in range(micro_batches):
            group = cost[first + m * ranks : first + (m + 1) * ranks]
            spread[m] = group.min() - group.max()
        load = np.zeros(ranks, np.int64)
        for m in np.argsort(spread, kind="mergesort"):
            begin = first + m * ranks
            by_cost = np.argsort(-cost[begin : begin + ranks], kind="mergesort")
            by_load = np.argsort(load, kind="mergesort")
            for i in range(ranks):
                rank, pack = by_load[i], begin + by_cost[i]
                rows[first + rank * micro_batches + m] = pack
                load[rank] += cost[pack]
    return rows
