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
from packhouse.worker.packing.segments import Ids, Int32, Int64, Packing, narrow
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
    counts = histogram(lengths, order, pack_length)
    groups = _group_count(counts, pack_length, ranks, max_segments) // micro_batches * micro_batches
    if groups == 0:
        return Packing(np.zeros(1, np.int32), order[:0]), order
    samples = np.empty(int(counts.sum()), order.dtype)
    leaders = np.empty(groups * ranks, order.dtype)
    _leaders(lengths, order, pack_length, leaders, samples[len(leaders) :])
    leaders = leaders.reshape(groups, ranks)[_group_order(groups, micro_batches, shuffle)].reshape(-1)
    offsets = np.zeros(len(leaders) + 1, narrow(len(samples) + 1))
    window = max(WINDOW, -(-BINS // ranks))
    left = _stream(lengths, leaders, samples, offsets, pack_length, ranks, window, max_segments or pack_length)
    return Packing(offsets, samples[: offsets[-1]]), left


def deal_to_ranks(packing: Packing, lengths: Int32, ranks: int, micro_batches: int, token: int, square: int) -> None:
    """Put the packs of whole steps, given group by group, in an order in which rank r has its packs side by side.

    It is done in place. Place ``(step · ranks + r) · micro_batches + m`` gets the pack of rank r in micro-batch m: in
    each step the groups are dealt by falling spread of cost, the costliest pack of a group to the rank that has least.
    ``lengths`` are the tokens of the samples, or of the pieces; a segment of n costs token · n + square · n².
    """
    _deal_to_ranks(packing.offsets, packing.sample, lengths, ranks, micro_batches, token, square)


def _group_count(counts: Int64, pack_length: int, ranks: int, max_segments: int | None) -> int:
    """Return how many groups the samples fill: by their tokens, unless their lengths cannot be packed that well."""
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
def _leaders(lengths: Int32, order: Ids, pack_length: int, leaders: Ids, rest: Ids) -> None:
    """Part the samples that have tokens: the longest to ``leaders`` by falling length; ties as in ``order``."""
    at, count = np.zeros(pack_length + 2, np.int64), len(leaders)
    for sample in order:
        at[lengths[sample]] += 1
    total, length = 0, pack_length + 1
    while total < count:
        length -= 1
        total += at[length]
        at[length] = total - at[length]
    left = 0
    for sample in order:
        n = lengths[sample]
        if n >= length and at[n] < count:
            leaders[at[n]] = sample
            at[n] += 1
        elif n > 0:
            rest[left] = sample
            left += 1


@compiled
def _stream(
    lengths: Int32, leaders: Ids, samples: Ids, offsets: Ids, pack_length: int, ranks: int, height: int, most: int
) -> Ids:
    """Fill the packs window by window, and return the samples that are left over.

    The samples to fill with lie behind room for the leaders, so that a pack is written where all has been read.
    """
    packs = len(leaders)
    rest = samples[packs:]
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
        _emit(leaders, window, pack_of, first, last, samples, offsets)
        carried = window[pack_of < 0]
    return carried


@compiled
def _emit(leaders: Ids, window: Ids, pack_of: Int32, first: int, last: int, sample: Ids, offsets: Ids) -> None:
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


@compiled
def _deal_to_ranks(
    offsets: Ids, sample: Ids, lengths: Int32, ranks: int, micro_batches: int, token: int, square: int
) -> None:
    width = ranks * micro_batches
    cost = np.empty(width, np.int64)
    for first in range(0, len(offsets) - 1, width):
        begin = offsets[first]
        held = sample[begin : offsets[first + width]].copy()
        begins = offsets[first : first + width + 1] - begin
        for pack in range(width):
            cost[pack] = 0
            for item in held[begins[pack] : begins[pack + 1]]:
                n = np.int64(lengths[item])
                cost[pack] += (token + square * n) * n
        for at, pack in enumerate(_assign(cost, ranks, micro_batches)):
            end = begin + begins[pack + 1] - begins[pack]
            sample[begin:end] = held[begins[pack] : begins[pack + 1]]
            offsets[first + at + 1] = end
            begin = end
