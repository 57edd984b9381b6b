"""Pieces: samples longer than a pack, cut so that strategies that cannot cut see nothing too long."""

from dataclasses import dataclass

import numpy as np

from packhouse.worker.packing.compiled import compiled
from packhouse.worker.packing.segments import Ids, Int32, Int64, narrow


@dataclass(frozen=True, slots=True)
class Pieces:
    """Samples cut into pieces of ``limit`` tokens and a last one of the rest, as numbers.

    Piece i is the last piece of sample i, the whole of most; the full pieces before it are numbered behind those.
    """

    limit: int
    length: Int32
    """(pieces,), tokens"""
    sample: Ids
    """(full pieces,), the sample of each, rising"""
    start: Int32
    """(full pieces,)"""

    def of(self, order: Ids) -> Ids:
        """Return the pieces of the samples ``order``, in that order."""
        samples = len(self.length) - len(self.sample)
        cut, first = np.unique(self.sample, return_index=True)
        first = np.append(first, len(self.sample)) + samples
        pieces: Ids = np.empty(_count(cut, first, order), narrow(len(self.length) + 1))
        _number(cut, first, order, pieces)
        return pieces

    def cuts(self, pieces: Ids, lengths: Int32) -> tuple[Ids, Int32, Int32]:
        """Return sample, start and length of ``pieces``; ``lengths`` are the samples' tokens."""
        return _cuts(pieces, lengths, self.length, self.sample, self.start)


def split(lengths: Int32, limit: int) -> Pieces | None:
    """Return samples of ``lengths`` tokens in pieces of at most ``limit``; None if all are whole."""
    if len(lengths) == 0 or lengths.max() <= limit:
        return None
    over = np.flatnonzero(lengths > limit)
    full = (lengths[over] - 1) // limit
    kind = narrow(len(lengths) + int(full.sum()) + 1)
    sample = np.repeat(over, full).astype(kind)
    start = (np.arange(len(sample)) - np.repeat(np.cumsum(full) - full, full)) * limit
    length = np.concatenate([lengths, np.full(len(sample), limit, np.int32)])
    length[over] -= full * np.int32(limit)
    return Pieces(limit, length, sample, start.astype(np.int32))


@compiled
def _count(cut: Ids, first: Int64, order: Ids) -> int:
    count = len(order)
    for sample in order:
        place = np.searchsorted(cut, sample)
        if place < len(cut) and cut[place] == sample:
            count += first[place + 1] - first[place]
    return count


@compiled
def _number(cut: Ids, first: Int64, order: Ids, pieces: Ids) -> None:
    at = 0
    for sample in order:
        place = np.searchsorted(cut, sample)
        if place < len(cut) and cut[place] == sample:
            for piece in range(first[place], first[place + 1]):
                pieces[at] = piece
                at += 1
        pieces[at] = sample
        at += 1


@compiled
def _cuts(pieces: Ids, lengths: Int32, length: Int32, sample: Ids, start: Int32) -> tuple[Ids, Int32, Int32]:
    samples = len(lengths)
    of, at, size = np.empty_like(pieces), np.empty(len(pieces), np.int32), length[pieces]
    for i in range(len(pieces)):
        piece = pieces[i]
        if piece < samples:
            of[i], at[i] = piece, lengths[piece] - size[i]
        else:
            of[i], at[i] = sample[piece - samples], start[piece - samples]
    return of, at, size
