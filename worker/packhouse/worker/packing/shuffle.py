"""Shuffles as sorts on a keyed 64-bit mix of each item's number: no library's random stream can change them."""

import numpy as np
import numpy.typing as npt

from packhouse.worker.packing.compiled import compiled
from packhouse.worker.packing.segments import Ids, narrow

SAMPLES, PACKS, STRATA, MICRO_BATCHES, GROUPS = range(1, 6)
"""Purposes: shuffles of one epoch that must not resemble each other."""

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_BUCKET = 16
"""Items of a bucket, about: few enough that insertion sorts it at once."""


def shuffled(count: int, seed: int | None, *key: int) -> Ids:
    """Return the numbers below ``count`` in the order of (seed, key); in their own for seed None.

    ``key`` says what is shuffled: epoch, purpose, and what else tells shuffles apart. int32 where that holds them.
    An item's key is the SplitMix64 output (Steele, Lea and Flood, OOPSLA 2014) at its number in the stream of the
    words. That output is a bijection of the number, so keys never tie and any sort gives the one order.
    """
    order = np.arange(count, dtype=narrow(count))
    if seed is not None:
        bits = min(max((count // _BUCKET).bit_length(), 1), 22)
        _sort(order, np.uint64(_state(seed, *key)), bits)
    return order


def first_shuffled(count: int, most: int, seed: int, *key: int) -> Ids:
    """Return the first ``most`` of ``shuffled(count, seed, *key)``, without ordering the others."""
    if most >= count:
        return shuffled(count, seed, *key)
    state, share = np.uint64(_state(seed, *key)), 1.1 * most / count
    while len(chosen := _below(count, state, np.uint64(min(int(share * 2**64), _WORD)))) < most:
        share *= 2
    return chosen[np.argsort(_keys(chosen, state))][:most]


def _state(seed: int, *key: int) -> int:
    state = 0
    for word in (seed, *key):
        state = mix((state + word) & _WORD)
    return state


def mix(word: int) -> int:
    """Return the SplitMix64 output for the state ``word``, as Python integers below 2**64."""
    word = (word + _GOLDEN) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


@compiled
def _key(item: int, state: np.uint64) -> np.uint64:
    word = state + np.uint64(item + 1) * np.uint64(_GOLDEN)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.uint64(word ^ (word >> np.uint64(31)))


@compiled
def _below(count: int, state: np.uint64, bound: np.uint64) -> Ids:
    """Return the items below ``count`` whose keys are below ``bound``, rising."""
    many = 0
    for item in range(count):
        many += int(_key(item, state) < bound)
    chosen, at = np.empty(many, np.int64), 0
    for item in range(count):
        if _key(item, state) < bound:
            chosen[at] = item
            at += 1
    return chosen


@compiled
def _keys(items: Ids, state: np.uint64) -> npt.NDArray[np.uint64]:
    keys = np.empty(len(items), np.uint64)
    for i in range(len(items)):
        keys[i] = _key(items[i], state)
    return keys


@compiled
def _sort(order: Ids, state: np.uint64, bits: int) -> None:
    """Sort the items 0, 1, … by key in place: into buckets by the top ``bits``, then by insertion in each."""
    at = np.zeros((1 << bits) + 1, np.int64)
    shift = np.uint64(64 - bits)
    for item in range(len(order)):
        at[np.int64(_key(item, state) >> shift) + 1] += 1
    for bucket in range(1 << bits):
        at[bucket + 1] += at[bucket]
    for item in range(len(order)):
        place = np.int64(_key(item, state) >> shift)
        order[at[place]] = item
        at[place] += 1
    first = 0
    for bucket in range(1 << bits):
        for i in range(first + 1, at[bucket]):
            moved, j = order[i], i
            key = _key(moved, state)
            while j > first and _key(order[j - 1], state) > key:
                order[j] = order[j - 1]
                j -= 1
            order[j] = moved
        first = at[bucket]
