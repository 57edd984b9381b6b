"""Segments: what every strategy returns, and the passes over it that do not depend on the strategy."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from packhouse.client.pack_table import Ids, Int32, Int64
from packhouse.worker.packing.compiled import compiled

if TYPE_CHECKING:
    from packhouse.worker.packing.pieces import Pieces
    from packhouse.worker.packing.stretches import Stretches

__all__ = ["Ids", "Int32", "Int64", "Packing", "costs", "joined", "narrow"]

_SEGMENTS_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Packing:
    """Packs as ranges of segments; pack ``i`` has the segments ``offsets[i]:offsets[i + 1]``.

    A segment is a whole sample unless one of ``start``, ``pieces`` and ``stretches`` tells otherwise. Numbers are as
    narrow as they can be: a large plan holds them all at once.
    """

    offsets: Ids
    """(packs + 1,)"""
    sample: Ids
    """(segments,); numbers of pieces where there are ``pieces``"""
    start: Int32 | None = None
    """(segments,), tokens from the start of the sample"""
    length: Int32 | None = None
    """(segments,), tokens, never 0; None with start"""
    pieces: "Pieces | None" = None
    stretches: "Stretches | None" = None

    @property
    def packs(self) -> int:
        """Number of packs."""
        return len(self.offsets) - 1

    @property
    def cutting(self) -> bool:
        """Whether a segment may be a part of a sample."""
        return self.start is not None or self.pieces is not None or self.stretches is not None

    def cuts(self, lengths: Int32, first: int = 0, last: int | None = None) -> tuple[Ids, Int32, Int32]:
        """Return sample, start and length of the segments of packs ``first:last``, of samples of ``lengths`` tokens."""
        offsets = self.offsets[first : None if last is None else last + 1]
        part = slice(int(offsets[0]), int(offsets[-1]))
        sample = self.sample[part]
        if self.pieces is not None:
            return self.pieces.cuts(sample, lengths)
        if self.stretches is not None:
            return sample, *self.stretches.cuts(offsets - offsets[0], sample, lengths, first)
        if self.start is not None and self.length is not None:
            return sample, self.start[part], self.length[part]
        return sample, np.zeros(len(sample), np.int32), lengths[sample]

    def head(self, packs: int) -> "Packing":
        """Return the first ``packs`` packs."""
        end = int(self.offsets[packs])
        start, length = (None if column is None else column[:end] for column in (self.start, self.length))
        stretches = None if self.stretches is None else self.stretches.of(packs)
        return Packing(self.offsets[: packs + 1], self.sample[:end], start, length, self.pieces, stretches)

    def padded(self, packs: int) -> "Packing":
        """Return the packs with empty ones behind them, ``packs`` in all."""
        empty = np.full(packs - self.packs, self.offsets[-1])
        stretches = None if self.stretches is None else self.stretches.of(packs)
        return replace(self, offsets=np.concatenate([self.offsets, empty]), stretches=stretches)

    def take(self, rows: Ids) -> "Packing":
        """Return the packs ``rows`` in their order; -1 stands for an empty pack."""
        offsets = _offsets(self.offsets, rows)

        def taken(values: Ids | None) -> Ids | None:
            return None if values is None else _taken(values, self.offsets, rows, offsets)

        stretches = None if self.stretches is None else self.stretches.take(rows)
        sample = _taken(self.sample, self.offsets, rows, offsets)
        return Packing(offsets, sample, taken(self.start), taken(self.length), self.pieces, stretches)


@compiled
def _offsets(offsets: Ids, rows: Ids) -> Ids:
    to = np.zeros(len(rows) + 1, offsets.dtype)
    for i in range(len(rows)):
        to[i + 1] = to[i]
        if rows[i] >= 0:
            to[i + 1] += offsets[rows[i] + 1] - offsets[rows[i]]
    return to


@compiled
def _taken(values: Ids, offsets: Ids, rows: Ids, to: Ids) -> Ids:
    taken = np.empty(to[-1], values.dtype)
    for i in range(len(rows)):
        if rows[i] >= 0:
            taken[to[i] : to[i + 1]] = values[offsets[rows[i]] : offsets[rows[i] + 1]]
    return taken


def narrow(count: int) -> type[np.int32] | type[np.int64]:
    """Return the type of numbers below ``count``."""
    return np.int32 if count < 2**31 else np.int64


def joined(parts: list[Packing], lengths: Int32) -> Packing:
    """Return the packs of all ``parts``, one after the other, of samples of ``lengths`` tokens and the same pieces.

    ``parts`` is left empty: each is let go when its packs are copied.
    """
    if len(parts) == 1:
        return parts.pop()
    if any(part.start is not None for part in parts):
        parts[:] = [Packing(part.offsets, *part.cuts(lengths)) for part in parts]
    names = ["sample"] if parts[0].start is None else ["sample", "start", "length"]
    segments, pieces = sum(len(part.sample) for part in parts), parts[0].pieces
    offsets = np.zeros(sum(part.packs for part in parts) + 1, narrow(segments + 1))
    columns = {name: np.empty(segments, np.result_type(*(getattr(part, name) for part in parts))) for name in names}
    stretches = [part.stretches for part in parts if part.stretches is not None]
    pack, segment = 0, 0
    parts.reverse()
    while parts:
        part = parts.pop()
        end, to = pack + part.packs, slice(segment, segment + len(part.sample))
        np.add(part.offsets[1:], segment, out=offsets[pack + 1 : end + 1], casting="same_kind")
        for name, column in columns.items():
            column[to] = getattr(part, name)
        pack, segment = end, to.stop
    together = stretches[0].followed_by(stretches[1:]) if stretches else None
    return Packing(offsets, **columns, pieces=pieces, stretches=together)


def costs(packing: Packing, lengths: Int32, token: int, square: int) -> tuple[Int32, Int64]:
    """Return the packs' tokens, int32, and costs, int64: the sum over segments of token · n + square · n².

    ``lengths`` are the tokens of the samples, or of the pieces.
    """
    none = np.zeros(0, np.int32)
    if packing.length is not None:
        return _sums(packing.offsets, none, packing.length, token, square)
    if packing.stretches is None:
        return _sums(packing.offsets, packing.sample, lengths, token, square)
    tokens, cost = np.empty(packing.packs, np.int32), np.empty(packing.packs, np.int64)
    first = 0
    while first < packing.packs:
        last = int(np.searchsorted(packing.offsets, packing.offsets[first] + _SEGMENTS_AT_ONCE, side="right")) - 1
        last = min(max(last, first + 1), packing.packs)
        offsets = packing.offsets[first : last + 1] - packing.offsets[first]
        _, _, length = packing.cuts(lengths, first, last)
        tokens[first:last], cost[first:last] = _sums(offsets, none, length, token, square)
        first = last
    return tokens, cost


@compiled
def _sums(offsets: Ids, sample: Ids, length: Int32, token: int, square: int) -> tuple[Int32, Int64]:
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
