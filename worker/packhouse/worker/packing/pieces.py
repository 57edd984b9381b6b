"""Pieces: samples longer than a pack, cut so that strategies that cannot cut see nothing too long."""

from dataclasses import dataclass

import numpy as np

from packhouse.worker.packing.compiled import compiled
from packhouse.worker.packing.segments import Ids, Int32, narrow


@dataclass(frozen=True, slots=True)
class Pieces:
    """Samples cut into pieces of ``limit`` tokens and a last one of the rest, as numbers.

    Piece i is the last piece of sample i, the whole of most; the full pieces before it are numbered behind those.
    """

    limit: int
    samples: int
    sample: Ids
    """(full pieces,), the sample of each, rising"""
    start: Int32
    """(full pieces,)"""

    def of(self, order: Ids) -> Ids:
        """Return the pieces of the samples ``order``, in that order."""
        count = len(self.sample) if len(order) == self.samples else _count(self.sample, order)
        pieces: Ids = np.empty(len(order) + count, narrow(self.samples + len(self.sample) + 1))
        _number(self.sample, self.samples, order, pieces)
        return pieces

    def cuts(self, pieces: Ids, lengths: Int32) -> tuple[Ids, Int32, Int32]:
        """Return sample, start and length of ``pieces``; ``lengths`` are the samples' tokens."""
        return _cuts(pieces, lengths, self.limit, self.sample, self.start)

    def whole(self, sizes: Int32) -> Int32:
        """Return the tokens of each sample; ``sizes`` are those of the pieces."""
        return _whole(sizes[: self.samples].copy(), self.limit, self.sample)


def split(lengths: Int32, limit: int) -> tuple[Int32, Pieces | None]:
    """Return samples of ``lengths`` tokens in pieces of at most ``limit``: their tokens, int32 (pieces,), and numbers.

    They are the samples themselves, and None, if all are whole.
    """
    if len(lengths) == 0 or lengths.max() <= limit:
        return lengths, None
    full = _full_pieces(lengths, limit)
    sizes, start = np.empty(len(lengths) + full, np.int32), np.empty(full, np.int32)
    sample = np.empty(full, narrow(len(sizes) + 1))
    _split(lengths, limit, sizes, sample, start)
    return sizes, Pieces(limit, len(lengths), sample, start)


@compiled
def _full_pieces(lengths: Int32, limit: int) -> int:
    count = 0
    for length in lengths:
        count += max(length - 1, 0) // limit
    return count


@compiled
def _split(lengths: Int32, limit: int, sizes: Int32, sample: Ids, start: Int32) -> None:
    at = 0
    for i in range(len(lengths)):
        full = max(lengths[i] - 1, 0) // limit
        sizes[i] = lengths[i] - full * limit
        sizes[len(lengths) + at : len(lengths) + at + full] = limit
        for number in range(full):
            sample[at], start[at] = i, number * limit
            at += 1


@compiled
def _count(cut: Ids, order: Ids) -> int:
    """Return how many of ``cut``, rising, are of the samples ``order``."""
    count = 0
    for sample in order:
        place = np.searchsorted(cut, sample)
        while place < len(cut) and cut[place] == sample:
            count += 1
            place += 1
    return count


@compiled
def _number(cut: Ids, samples: int, order: Ids, pieces: Ids) -> None:
    at = 0
    for sample in order:
        place = np.searchsorted(cut, sample)
        while place < len(cut) and cut[place] == sample:
            pieces[at] = samples + place
            at += 1
            place += 1
        pieces[at] = sample
        at += 1


@compiled
def _cuts(pieces: Ids, lengths: Int32, limit: int, sample: Ids, start: Int32) -> tuple[Ids, Int32, Int32]:
    samples = len(lengths)
    of, at, size = np.empty_like(pieces), np.empty(len(pieces), np.int32), np.empty(len(pieces), np.int32)
    for i in range(len(pieces)):
        piece = pieces[i]
        if piece < samples:
            of[i] = piece
            at[i] = max(lengths[piece] - 1, 0) // limit * limit
            size[i] = lengths[piece] - at[i]
        else:
            of[i], at[i], size[i] = sample[piece - samples], start[piece - samples], limit
    return of, at, size


@compiled
def _whole(lengths: Int32, limit: int, sample: Ids) -> Int32:
    for i in sample:
        lengths[i] += limit
    return lengths
