"""Strategy best_fit: best-fit decreasing on the histogram of lengths, so that its time hardly grows with the samples.

Best-fit decreasing takes samples from the longest down and puts each into the pack with the least room that holds it.
Samples of one length are alike, and so are packs with the same room; so whole groups are placed at once. A **group**
is a number of packs that are alike: each is a pack of its parent group with some more samples of one length. What the
groups' packs hold is then dealt out from pools, one for each length, in the order the samples were given: shuffled
samples give pools that are shuffled.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from packhouse.worker.packing.compiled import compiled
from packhouse.worker.packing.segments import Ids, Int32, Int64, Packing, narrow

PARENT, LENGTH, COPIES, PACKS, BELOW, SEGMENTS = range(6)
"""A group's columns: its parent or -1; the length of its own samples and their number in each pack; how many packs are
still in it, not in a child; the group below it on the stack of those with the same room, or -1; segments of a pack."""


def best_fit(
    lengths: Int32,
    order: Ids,
    pack_length: int,
    max_segments: int | None = None,
    shuffle: Callable[[int], Ids] | None = None,
    out: Ids | None = None,
) -> Packing:
    """Return the packs of the samples ``order``, none longer than ``pack_length``. Empty samples are left out.

    As many packs as best-fit decreasing needs; a pack of ``max_segments`` is taken for full. ``shuffle`` gives the
    order of so many packs; without it they come by their shortest sample, from the longest down.
    ``out`` is memory for as many samples as ``order`` has, and may be ``order``: what is returned lies there.
    """
    counts = histogram(lengths, order, pack_length)
    groups = place(counts, pack_length, max_segments)
    kept = int(counts.sum())
    sizes = np.repeat(groups[:, SEGMENTS].astype(narrow(kept + 1)), groups[:, PACKS])
    rows = np.arange(len(sizes)) if shuffle is None else shuffle(len(sizes))
    offsets = np.zeros(len(sizes) + 1, sizes.dtype)
    np.cumsum(sizes[rows], dtype=sizes.dtype, out=offsets[1:])
    to = sizes
    to[rows] = offsets[:-1]
    del rows
    pools = np.cumsum(counts) - counts
    samples = _pool(lengths, order, pools.copy(), kept)
    dealt = np.empty_like(samples) if out is None else out[:kept]
    _deal(groups, pools, samples, to, dealt)
    return Packing(offsets, dealt)


def place(counts: Int64, pack_length: int, max_segments: int | None = None) -> Int64:
    """Return the groups that best-fit decreasing makes of the histogram ``counts`` (pack_length + 1,): (groups, 6)."""
    return _place(counts, pack_length, max_segments or pack_length)


def histogram(lengths: Int32, order: Ids, pack_length: int) -> Int64:
    """Count the samples ``order``, each there once, by length from 0 to ``pack_length``; none counts as of length 0."""
    # Where all samples are meant, their order does not matter, and reading them as they lie is ten times faster.
    if len(order) == len(lengths):
        return _counted(lengths, pack_length)
    return _counted_of(lengths, order, pack_length)


@compiled
def _counted(lengths: Int32, pack_length: int) -> Int64:
    counts = np.zeros(pack_length + 1, np.int64)
    for length in lengths:
        counts[length] += 1
    counts[0] = 0
    return counts


@compiled
def _counted_of(lengths: Int32, order: Ids, pack_length: int) -> Int64:
    counts = np.zeros(pack_length + 1, np.int64)
    for sample in order:
        counts[lengths[sample]] += 1
    counts[0] = 0
    return counts


@compiled
def _place(counts: Int64, pack_length: int, most: int) -> Int64:
    leaves = 1
    while leaves <= pack_length:
        leaves *= 2
    open_rooms = np.zeros(2 * leaves, np.bool_)
    top = np.full(pack_length + 1, -1, np.int64)
    groups = np.empty((1024, 6), np.int64)
    made = 0
    for length in range(pack_length, 0, -1):
        left = counts[length]
        while left > 0:
            room = _tightest(open_rooms, leaves, length)
            parent = top[room] if room >= 0 else -1
            space = room if room >= 0 else pack_length
            held = groups[parent, SEGMENTS] if parent >= 0 else 0
            copies = min(space // length, left, most - held)
            packs = left // copies
            if parent >= 0:
                packs = min(packs, groups[parent, PACKS])
                groups[parent, PACKS] -= packs
                if groups[parent, PACKS] == 0:
                    top[room] = groups[parent, BELOW]
                    if top[room] < 0:
                        _close(open_rooms, leaves + room)
            if made == len(groups):
                wider = np.empty((2 * made, 6), np.int64)
                wider[:made] = groups
                groups = wider
            # Where no segment can be added, there is no room.
            rest = space - copies * length if held + copies < most else 0
            groups[made, PARENT], groups[made, LENGTH], groups[made, COPIES] = parent, length, copies
            groups[made, PACKS], groups[made, BELOW], groups[made, SEGMENTS] = packs, top[rest], held + copies
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
def _pool(lengths: Int32, order: Ids, at: Int64, kept: int) -> Ids:
    """Return the samples that have tokens by length and then as given; ``at`` is where each length begins."""
    samples = np.empty(kept, order.dtype)
    for sample in order:
        length = lengths[sample]
        if length > 0:
            samples[at[length]] = sample
            at[length] += 1
    return samples


@compiled
def _deal(groups: Int64, at: Int64, samples: Ids, to: Ids, dealt: Ids) -> None:
    """Fill the packs of the groups from the pools; ``to`` is where the segments of each pack begin."""
    pack = 0
    for leaf in range(len(groups)):
        for _ in range(groups[leaf, PACKS]):
            segment, group = to[pack], leaf
            while group >= 0:
                length = groups[group, LENGTH]
                for _ in range(groups[group, COPIES]):
                    dealt[segment] = samples[at[length]]
                    at[length] += 1
                    segment += 1
                group = groups[group, PARENT]
            pack += 1
