"""Segments: what every strategy returns, and the passes over it that do not depend on the strategy."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packhouse.worker.packing.compiled import compiled

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Packing:
    """Packs as ranges of segments; pack ``i`` has the segments ``offsets[i]:offsets[i + 1]``."""

    offsets: Int64
    """(packs + 1,)"""
    sample: Int64
    """(segments,), place of the sample in the order that the strategy was given"""
    start: Int32
    """(segments,), tokens from the start of the sample"""
    length: Int32
    """(segments,), tokens, never 0"""

    @property
    def packs(self) -> int:
        """Number of packs."""
        return len(self.offsets) - 1

    def head(self, packs: int) -> "Packing":
        """Return the first ``packs`` packs."""
        end = int(self.offsets[packs])
        return Packing(self.offsets[: packs + 1], self.sample[:end], self.start[:end], self.length[:end])

    def padded(self, packs: int) -> "Packing":
        """Return the packs with empty ones behind them, ``packs`` in all."""
        empty = np.full(packs - self.packs, self.offsets[-1])
        return Packing(np.concatenate([self.offsets, empty]), self.sample, self.start, self.length)


def joined(parts: list[Packing]) -> Packing:
    """Return the packs of all ``parts``, one part after the other."""
    if len(parts) == 1:
        return parts[0]
    shifts = np.cumsum([0, *(len(part.sample) for part in parts)])
    offsets = [part.offsets[1:] + shift for part, shift in zip(parts, shifts[:-1], strict=True)]
    return Packing(
        np.concatenate([np.zeros(1, np.int64), *offsets]),
        np.concatenate([part.sample for part in parts]),
        np.concatenate([part.start for part in parts]),
        np.concatenate([part.length for part in parts]),
    )


@compiled
def costs(offsets: Int64, length: Int32, token: int, square: int) -> tuple[Int32, Int64]:
    """Return the packs' tokens, int32, and costs, int64: the sum over segments of token · n + square · n²."""
    packs = len(offsets) - 1
    tokens = np.zeros(packs, np.int32)
    cost = np.zeros(packs, np.int64)
    for pack in range(packs):
        for i in range(offsets[pack], offsets[pack + 1]):
            n = np.int64(length[i])
            tokens[pack] += n
            cost[pack] += (token + square * n) * n
    return tokens, cost
