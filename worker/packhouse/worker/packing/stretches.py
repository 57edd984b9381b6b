"""Stretches: the segments of packs that a stream of samples was cut into, told from where each pack begins."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from packhouse.worker.packing.compiled import compiled
from packhouse.worker.packing.segments import Ids, Int32


@dataclass(frozen=True, slots=True)
class Stretches:
    """Packs of samples end to end: in each, a sample goes on to its end, to the pack's, or for ``longest`` tokens.

    So a segment's start and length follow from those before it in its pack, and need not be held.
    """

    begin: Int32
    """(packs,), tokens from the start of the sample to the pack's first segment"""
    pack_length: int
    longest: int

    def cuts(self, offsets: Ids, sample: Ids, lengths: Int32, first: int) -> tuple[Int32, Int32]:
        """Return start and length of the segments of the packs from ``first`` on, of which there are ``offsets``."""
        begin = self.begin[first : first + len(offsets) - 1]
        return _cuts(offsets, sample, begin, lengths, self.pack_length, self.longest)

    def take(self, rows: Ids) -> "Stretches":
        """Return those of the packs ``rows``; -1 stands for an empty pack."""
        return Stretches(self.begin[rows], self.pack_length, self.longest)

    def of(self, packs: int) -> "Stretches":
        """Return those of the first ``packs`` packs; where there are fewer, of empty ones behind them."""
        begin = np.pad(self.begin[:packs], (0, max(packs - len(self.begin), 0)))
        return Stretches(begin, self.pack_length, self.longest)

    def followed_by(self, others: "Iterable[Stretches]") -> "Stretches":
        """Return those of these packs and then of the others'."""
        return Stretches(np.concatenate([self.begin, *(one.begin for one in others)]), self.pack_length, self.longest)


@compiled
def _cuts(
    offsets: Ids, sample: Ids, begin: Int32, lengths: Int32, pack_length: int, longest: int
) -> tuple[Int32, Int32]:
    start, length = np.empty(len(sample), np.int32), np.empty(len(sample), np.int32)
    for pack in range(len(offsets) - 1):
        room, done = pack_length, int(begin[pack])
        for i in range(offsets[pack], offsets[pack + 1]):
            n = min(int(lengths[sample[i]]) - done, room, longest)
            start[i], length[i] = done, n
            room -= n
            done += n
            if done == lengths[sample[i]]:
                done = 0
    return start, length
