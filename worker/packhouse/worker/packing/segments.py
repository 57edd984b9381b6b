"""Segments: what every strategy returns, and the passes over it that do not depend on the strategy."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from packhouse.client.pack_table import Ids, Int32, Int64
from packhouse.worker.packing.compiled import compiled

if TYPE_CHECKING:
    from packhouse.worker.packing.pieces import Pieces

__all__ = ["Ids", "Int32", "Int64", "Packing", "costs", "joined", "narrow"]


@dataclass(frozen=True, slots=True)
class Packing:
    """Packs as ranges of segments; pack ``i`` has the segments ``offsets[i]:offsets[i + 1]``."""

    offsets: Int64
    """(packs + 1,)"""
    sample: Ids
    """(segments,); numbers of pieces where there are ``pieces``"""
    start: Int32 | None = None
    """(segments,), tokens from the start of the sample; None: each segment is a whole sample, or piece"""
    length: Int32 | None = None
    """(segments,), tokens, never 0; None with start"""
    pieces: "Pieces | None" = None

    @property
    def packs(self) -> int:
        """Number of packs."""
        return len(self.offsets) - 1

    @property
    def cutting(self) -> bool:
        """Whether a segment may be a part of a sample."""
        return self.start is not None or self.pieces is not None

    def cuts(self, lengths: Int32, first: int = 0, last: int | None = None) -> tuple[Ids, Int32, Int32]:
        """Return sample, start and length of the segments ``first:last``, of samples of ``lengths`` tokens."""
        sample = self.sample[first:last]
        if self.pieces is not None:
            return self.pieces.cuts(sample, lengths)
        if self.start is not None and self.length is not None:
            return sample, self.start[first:last], self.length[first:last]
        return sample, np.zeros(len(sample), np.int32), lengths[sample]

    def head(self, packs: int) -> "Packing":
        """Return the first ``packs`` packs."""
        end = int(self.offsets[packs])
        start, length = (None if column is None else column[:end] for column in (self.start, self.length))
        return Packing(self.offsets[: packs + 1], self.sample[:end], start, length, self.pieces)

    def padded(self, packs: int) -> "Packing":
        """Return the packs with empty ones behind them, ``packs`` in all."""
        empty = np.full(packs - self.packs, self.offsets[-1])
        return replace(self, offsets=np.concatenate([self.offsets, empty]))

    def take(self, rows: Int64) -> "Packing":
        """Return the packs ``rows`` in their order; -1 stands for an empty pack."""
        offsets = _offsets(self.offsets, rows)
        sample = _taken(self.sample, self.offsets, rows, offsets)
        if self.start is None or self.length is None:
            return Packing(offsets, sample, pieces=self.pieces)
        start, length = (_taken(column, self.offsets, rows, offsets) for column in (self.start, self.length))
        return Packing(offsets, sample, start, length)


@compiled
def _offsets(offsets: Int64, rows: Int64) -> Int64:
    to = np.zeros(len(rows) + 1, np.int64)
    for i in range(len(rows)):
        to[i + 1] = to[i]
        if rows[i] >= 0:
            to[i + 1] += offsets[rows[i] + 1] - offsets[rows[i]]
    return to


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
    """Return the packs of all ``parts``, one after the other, of samples of ``lengths`` tokens and the same pieces."""
    if len(parts) == 1:
        return parts[0]
    shifts = np.cumsum([0, *(len(part.sample) for part in parts)])
    offsets = [part.offsets[1:] + shift for part, shift in zip(parts, shifts[:-1], strict=True)]
    offset = np.concatenate([np.zeros(1, np.int64), *offsets])
    if all(part.start is None for part in parts):
        return Packing(offset, np.concatenate([part.sample for part in parts]), pieces=parts[0].pieces)
    sample, start, length = zip(*(part.cuts(lengths) for part in parts), strict=True)
    return Packing(offset, np.concatenate(sample), np.concatenate(start), np.concatenate(length))


def costs(packing: Packing, lengths: Int32, token: int, square: int) -> tuple[Int32, Int64]:
    """Return the packs' tokens, int32, and costs, int64: the sum over segments of token · n + square · n²."""
    if packing.length is not None:
        return _sums(packing.offsets, np.zeros(0, np.int32), packing.length, token, square)
    sizes = lengths if packing.pieces is None else packing.pieces.length
    return _sums(packing.offsets, packing.sample, sizes, token, square)


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
