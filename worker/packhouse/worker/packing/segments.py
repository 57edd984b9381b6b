"""Segments: what every strategy returns, and the passes over it that do not depend on the strategy."""

from dataclasses import dataclass

import numpy as np

from packhouse.client.pack_table import Ids, Int32, Int64
from packhouse.worker.packing.compiled import compiled

__all__ = ["Ids", "Int32", "Int64", "Packing", "costs", "joined", "narrow"]


@dataclass(frozen=True, slots=True)
class Packing:
    """Packs as ranges of segments; pack ``i`` has the segments ``offsets[i]:offsets[i + 1]``."""

    offsets: Int64
    """(packs + 1,)"""
    sample: Ids
    """(segments,)"""
    start: Int32 | None = None
    """(segments,), tokens from the start of the sample; None: each segment is a whole sample"""
    length: Int32 | None = None
    """(segments,), tokens, never 0; None with start"""

    @property
    def packs(self) -> int:
        """Number of packs."""
        return len(self.offsets) - 1

    def cuts(self, lengths: Int32, first: int = 0, last: int | None = None) -> tuple[Int32, Int32]:
        """Return start and length of the segments ``first:last``, of samples of ``lengths`` tokens."""
        part = slice(first, last)
        if self.start is None or self.length is None:
            length = lengths[self.sample[part]]
            return np.zeros(len(length), np.int32), length
        return self.start[part], self.length[part]

    def of_pieces(self, sample: Ids, start: Int32, length: Int32) -> "Packing":
        """Return the packs where sample i stood for the piece ``start[i]``, ``length[i]`` of ``sample[i]``."""
        return Packing(self.offsets, sample[self.sample], start[self.sample], length[self.sample])

    def head(self, packs: int) -> "Packing":
        """Return the first ``packs`` packs."""
        end = int(self.offsets[packs])
        columns = (None if column is None else column[:end] for column in (self.start, self.length))
        return Packing(self.offsets[: packs + 1], self.sample[:end], *columns)

    def padded(self, packs: int) -> "Packing":
        """Return the packs with empty ones behind them, ``packs`` in all."""
        empty = np.full(packs - self.packs, self.offsets[-1])
        return Packing(np.concatenate([self.offsets, empty]), self.sample, self.start, self.length)

    def take(self, rows: Int64) -> "Packing":
        """Return the packs ``rows`` in their order; -1 stands for an empty pack."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(np.where(rows < 0, 0, np.diff(self.offsets, append=self.offsets[-1])[rows]), out=offsets[1:])
        if self.start is None or self.length is None:
            return Packing(offsets, _taken(self.sample, self.offsets, rows, offsets))
        columns = (_taken(column, self.offsets, rows, offsets) for column in (self.sample, self.start, self.length))
        return Packing(offsets, *columns)


@compiled
def _taken(values: Ids, offsets: Int64, rows: Int64, to: Int64) -> Ids:
    taken = np.empty(to[-1], values.dtype)
    for i in range(len(rows)):
        if rows[i] >= 0:
            taken[to[i] : to[i + 1]] = values[offsets[rows[i]] : offsets[rows[i] + 1]]
    return taken


def narrow(count: int) -> type[np.int32] | type[np.int64]:
    """Return the type of numbers below ``count``."""
    return np.int32 if count < 2**31 else np.int64


def joined(parts: list[Packing], lengths: Int32) -> Packing:
    """Return the packs of all ``parts``, one part after the other, of samples of ``lengths`` tokens."""
    if len(parts) == 1:
        return parts[0]
    shifts = np.cumsum([0, *(len(part.sample) for part in parts)])
    offsets = [part.offsets[1:] + shift for part, shift in zip(parts, shifts[:-1], strict=True)]
    offset = np.concatenate([np.zeros(1, np.int64), *offsets])
    sample = np.concatenate([part.sample for part in parts])
    if all(part.start is None for part in parts):
        return Packing(offset, sample)
    starts, sizes = zip(*(part.cuts(lengths) for part in parts), strict=True)
    return Packing(offset, sample, np.concatenate(starts), np.concatenate(sizes))


def costs(packing: Packing, lengths: Int32, token: int, square: int) -> tuple[Int32, Int64]:
    """Return the packs' tokens, int32, and costs, int64: the sum over segments of token · n + square · n²."""
    if packing.length is None:
        return _sums(packing.offsets, packing.sample, lengths, token, square)
    return _sums(packing.offsets, np.zeros(0, np.int32), packing.length, token, square)


@compiled
def _sums(offsets: Int64, sample: Ids, length: Int32, token: int, square: int) -> tuple[Int32, Int64]:
    """Sum over segments; ``length`` is of samples, or of segments where no samples are given."""
    packs, direct = len(offsets) - 1, len(sample) == 0
    tokens = np.zeros(packs, np.int32)
    cost = np.zeros(packs, np.int64)
    for pack in range(packs):
        for i in range(offsets[pack], offsets[pack + 1]):
            n = np.int64(length[i]) if direct else np.int64(length[sample[i]])
            tokens[pack] += n
            cost[pack] += (token + square * n) * n
    return tokens, cost
