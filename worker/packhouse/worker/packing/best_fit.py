"""Strategy best_fit: best-fit decreasing on the histogram of lengths, so that its time hardly grows with the samples.

Best-fit decreasing takes pieces from the longest down and puts each into the pack with the least room that holds it.
Pieces of one length are alike, and so are packs with the same room; so whole groups are placed at once. A **group** is
a number of packs that are alike: each is a pack of its parent group with some more pieces of one length. What the
groups' packs hold is then dealt out from pools, one for each length, in the order the samples were given: shuffled
samples give pools that are shuffled.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from packhouse.worker.packing.compiled import compiled
from packhouse.worker.packing.segments import Int32, Int64, Packing

PARENT, LENGTH, COPIES, PACKS, BELOW = range(5)
"""A group's columns: its parent or -1; the length of its own pieces and their number in each pack; how many packs are
still in it, not in a child; the group below it on the stack of those with the same room, or -1."""


def best_fit(lengths: Int32 | Int64, pack_length: int, shuffle: Callable[[int], Int64] | None = None) -> Packing:
    """Return the packs of samples of ``lengths`` tokens (int32 or int64) in the order given.

    As many packs as best-fit decreasing needs. A sample over ``pack_length`` is split into full packs and a piece for
    the rest. Empty samples get no segment. ``shuffle`` gives the order of so many packs; without it they come by their
    shortest piece, from the longest down.
    """
    counts = _histogram(lengths, pack_length)
    groups = _place(counts, pack_length)
    sizes = np.repeat(_segments(groups), groups[:, PACKS])
    order = np.arange(len(sizes)) if shuffle is None else shuffle(len(sizes))
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes[order], out=offsets[1:])
    to = np.empty(len(sizes), np.int64)
    to[order] = offsets[:-1]
    pools = np.cumsum(counts) - counts
    samples, starts = _pool(lengths, pack_length, pools.copy(), int(counts.sum()))
    return Packing(offsets, *_deal(groups, pools, samples, starts, to))


@compiled
def _histogram(lengths: Int32 | Int64, pack_length: int) -> Int64:
    """Count the pieces of each length from 0 to ``pack_length``; nothing is of length 0."""
    counts = np.zeros(pack_length + 1, np.int64)
    for length in lengths:
        counts[pack_length] += length // pack_length
        counts[length % pack_length] += 1
    counts[0] = 0
    return counts


@compiled
def _place(counts: Int64, pack_length: int) -> Int64:
    """Return the groups that best-fit decreasing makes of the histogram, (groups, 5)."""
    leaves = 1
    while leaves <= pack_length:
        leaves *= 2
    open_rooms = np.zeros(2 * leaves, np.bool_)
    top = np.full(pack_length + 1, -1, np.int64)
    groups = np.empty((1024, 5), np.int64)
    made = 0
    for length in range(pack_length, 0, -1):
        left = counts[length]
        while left > 0:
            room = _tightest(open_rooms, leaves, length)
            parent = top[room] if room >= 0 else -1
            space = room if room >= 0 else pack_length
            copies = min(space // length, left)
            packs = left // copies
            if parent >= 0:
                packs = min(packs, groups[parent, PACKS])
                groups[parent, PACKS] -= packs
                if groups[parent, PACKS] == 0:
                    top[room] = groups[parent, BELOW]
                    if top[room] < 0:
                        _close(open_rooms, leaves + room)
            if made == len(groups):
                wider = np.empty((2 * made, 5), np.int64)
                wider[:made] = groups
                groups = wider
            rest = space - copies * length
            groups[made, PARENT], groups[made, LENGTH], groups[made, COPIES] = parent, length, copies
            groups[made, PACKS], groups[made, BELOW] = packs, top[rest]
            top[rest] = made
            _open(open_rooms, leaves + rest)
            made += 1
            left -= packs * copies
    return groups[:made]


@compiled
def _tightest(tree: npt.NDArray[np.bool_], leaves: int, least: int) -> int:
    """Return the smallest room of at least ``least`` that some pack has, or -1. The tree's leaves are the rooms."""
    node = leaves + least
    if tree[node]:
        return least
    while node > 1 and (node % 2 == 1 or not tree[node + 1]):
        node //= 2
    if node == 1:
        return -1
    node += 1
    while node < leaves:
        node *= 2
        if not tree[node]:
            node += 1
    return node - leaves


@compiled
def _open(tree: npt.NDArray[np.bool_], node: int) -> None:
    while node > 0 and not tree[node]:
        tree[node] = True
        node //= 2


@compiled
def _close(tree: npt.NDArray[np.bool_], node: int) -> None:
    tree[node] = False
    while node > 1 and not tree[node ^ 1]:
        node //= 2
        tree[node] = False


@compiled
def _segments(groups: Int64) -> Int64:
    """Return the number of segments in a pack of each group."""
    segments = groups[:, COPIES].copy()
    for group in range(len(groups)):
        if groups[group, PARENT] >= 0:
            segments[group] += segments[groups[group, PARENT]]
    return segments


@compiled
def _pool(lengths: Int32 | Int64, pack_length: int, at: Int64, pieces: int) -> tuple[Int64, Int32]:
    """Return the samples and starts of all pieces, by length and then as given; ``at`` is where each length begins."""
    samples, starts = np.empty(pieces, np.int64), np.empty(pieces, np.int32)
    for i in range(len(lengths)):
        for start in range(0, lengths[i], pack_length):
            piece = min(lengths[i] - start, pack_length)
            samples[at[piece]], starts[at[piece]] = i, start
            at[piece] += 1
    return samples, starts


@compiled
def _deal(groups: Int64, at: Int64, samples: Int64, starts: Int32, to: Int64) -> tuple[Int64, Int32, Int32]:
    """Fill the packs of the groups from the pools; ``to`` is where the segments of each pack begin."""
    sample, start, length = np.empty_like(samples), np.empty_like(starts), np.empty_like(starts)
    pack = 0
    for leaf in range(len(groups)):
        for _ in range(groups[leaf, PACKS]):
            segment, group = to[pack], leaf
            while group >= 0:
                piece = groups[group, LENGTH]
                for _ in range(groups[group, COPIES]):
                    source = at[piece]
                    at[piece] += 1
                    sample[segment], start[segment], length[segment] = samples[source], starts[source], piece
                    segment += 1
                group = groups[group, PARENT]
            pack += 1
    return sample, start, length
