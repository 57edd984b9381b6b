"""Shuffles as sorts on a keyed 64-bit mix of each item's number: no library's random stream can change them."""

import numpy as np
import numpy.typing as npt

from packhouse.worker.packing.compiled import compiled

SAMPLES = 1
PACKS = 2
"""Purposes: shuffles of one epoch that must not resemble each other."""

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def shuffled(count: int, seed: int | None, epoch: int, purpose: int) -> npt.NDArray[np.int64]:
    """Return the numbers below ``count`` in the order of (seed, epoch, purpose), int64; in their own for seed None.

    An item's key is the SplitMix64 output (Steele, Lea and Flood, OOPSLA 2014) at its number in the stream of the
    three. That output is a bijection of the number, so keys never tie and any sort gives the one order.
    """
    if seed is None:
        return np.arange(count)
    state = 0
    for word in (seed, epoch, purpose):
        state = mix((state + word) & _WORD)
    return np.argsort(_keys(count, np.uint64(state))).astype(np.int64, copy=False)


def mix(word: int) -> int:
    """Return the SplitMix64 output for the state ``word``, as Python integers below 2**64."""
    word = (word + _GOLDEN) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


@compiled
def _keys(count: int, state: np.uint64) -> npt.NDArray[np.uint64]:
    keys = np.empty(count, np.uint64)
    for i in range(count):
        word = state + np.uint64(i + 1) * np.uint64(_GOLDEN)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        keys[i] = word ^ (word >> np.uint64(31))
    return keys
