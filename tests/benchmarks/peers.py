"""Peers' ways to pack, written anew from descriptions of what they do, without their data sets around them.

Each takes the lengths (samples,), none over ``pack_length``, and returns packs as lists of samples. They are loops in
Python where the peers' are, and numba where the peer's is.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numba
import numpy as np

Packs = list[list[int]]


def trl_bfd(lengths: Sequence[int], pack_length: int, batch: int | None = None) -> Packs:
    """TRL ``bfd``: best-fit decreasing by a segment tree over rooms; ``datasets.map`` hands it 1000 rows at a time."""
    packs: Packs = []
    size = batch or len(lengths)
    for first in range(0, len(lengths), size):
        packs += _bfd(range(first, min(first + size, len(lengths))), lengths, pack_length)
    return packs


def _bfd(samples: Iterable[int], lengths: Sequence[int], pack_length: int) -> Packs:
    leaves = 1 << pack_length.bit_length()
    tree = [0] * (2 * leaves)

    def put(room: int, value: int) -> None:
        node = leaves + room
        tree[node] = value
        while node > 1:
            node //= 2
            tree[node] = max(tree[2 * node], tree[2 * node + 1])

    def tightest(least: int) -> int:
        node = leaves + least
        while not tree[node]:
            while node % 2:
                node //= 2
            node += 1
        while node < leaves:
            node = 2 * node if tree[2 * node] else 2 * node + 1
        return node - leaves

    by_room: dict[int, deque[int]] = {}
    put(pack_length, 1)
    packs: Packs = []
    for sample in sorted(samples, key=lengths.__getitem__, reverse=True):
        room = tightest(lengths[sample])
        queue = by_room.get(room)
        if queue:
            pack = queue.popleft()
            if not queue and room < pack_length:
                put(room, 0)
        else:
            pack = len(packs)
            packs.append([])
        packs[pack].append(sample)
        left = room - lengths[sample]
        if left:
            by_room.setdefault(left, deque()).append(pack)
            put(left, 1)
    return packs


def llama_factory(lengths: Sequence[int], pack_length: int, batch: int = 1000) -> Packs:
    """LLaMA-Factory's greedy knapsack: the longest that fits, again and again, per 1000 rows."""
    packs: Packs = []
    for first in range(0, len(lengths), batch):
        order = sorted(range(first, min(first + batch, len(lengths))), key=lengths.__getitem__)
        sizes = [lengths[i] for i in order]
        while order:
            pack, room = [], pack_length
            while at := bisect_right(sizes, room):
                room -= sizes.pop(at - 1)
                pack.append(order.pop(at - 1))
            packs.append(pack)
    return packs


def axolotl(lengths: Sequence[int], pack_length: int, group: int = 100_000, most: int = 200) -> Packs:
    """Axolotl's multipack: first fit in order, in groups of 100,000, up to 200 samples a pack."""
    packs: Packs = []
    array = np.array(lengths, np.int64)
    for first in range(0, len(lengths), group):
        of, count = _first_fit(array[first : first + group], pack_length, most)
        part: Packs = [[] for _ in range(count)]
        for sample, pack in enumerate(of.tolist(), first):
            part[pack].append(sample)
        packs += part
    return packs


@numba.njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _first_fit(lengths: Any, pack_length: int, most: int) -> Any:
    room, held = np.empty(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    of, count = np.empty(len(lengths), np.int64), 0
    for i in range(len(lengths)):
        pack = 0
        while pack < count and (room[pack] < lengths[i] or held[pack] == most):
            pack += 1
        if pack == count:
            room[pack] = pack_length
            count += 1
        room[pack] -= lengths[i]
        held[pack] += 1
        of[i] = pack
    return of, count


def xtuner_soft(lengths: Sequence[int], pack_length: int, chunk: int = 10_000, buffer: int = 1000) -> Packs:
    """XTuner's soft packing: next fit from the end of a chunk, filled with the shortest of the next 1000 samples."""
    packs: Packs = []
    for first in range(0, len(lengths), chunk):
        pending = list(range(first, min(first + chunk, len(lengths))))
        pack: list[int] = []
        total = 0
        while pending:
            sample = pending.pop()
            if total + lengths[sample] > pack_length:
                window = sorted(pending[-buffer:], key=lengths.__getitem__) if total < pack_length else []
                taken = set()
                for other in window:
                    if total + lengths[other] > pack_length:
                        break
                    total += lengths[other]
                    taken.add(other)
                    pack.append(other)
                pending[-buffer:] = [i for i in pending[-buffer:] if i not in taken]
                packs.append(pack)
                pack, total = [], 0
            pack.append(sample)
            total += lengths[sample]
        packs.append(pack)
    return packs


def next_fit(lengths: Sequence[int], pack_length: int) -> Packs:
    """Megatron-LM's scheduler: next fit in order."""
    packs: Packs = [[]]
    room = pack_length
    for sample, length in enumerate(lengths):
        if length > room:
            packs.append([])
            room = pack_length
        packs[-1].append(sample)
        room -= length
    return packs


def nanochat_lost(lengths: Sequence[int], pack_length: int, buffer: int = 1000) -> int:
    """Return the tokens that nanochat's loader crops away: best fit from 1000 documents, the shortest cut to fill."""
    source = iter(lengths)
    held = sorted(length for length, _ in zip(source, range(buffer), strict=False))
    lost = 0
    room = pack_length
    for length in source:
        at = bisect_right(held, room)
        taken = held.pop(at - 1) if at else held.pop(0)
        lost += max(taken - room, 0)
        room = room - taken if taken < room else pack_length
        held.insert(bisect_right(held, length), length)
    return lost
