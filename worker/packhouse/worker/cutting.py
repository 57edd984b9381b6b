"""Cutting: where the content of a source says that its blocks end, so that a change re-does only its neighbourhood.

A block ends at a **peak**: a line whose rank, a hash of it, is the highest within a width before and behind it (the
local maximum method of N. Bjørner, A. Blass and Y. Gurevich, "Content-dependent chunking for differential
compression", 2010). Whether a line is a peak depends on nothing beyond that width, so cuts never lose step: a line
that is inserted or deleted moves the borders of the block it falls in, and none further off.

The width grows with what precedes the line, in powers of two: files of megabytes have small blocks and an appended
tail is cheap, files of gigabytes have few blocks. What follows the last peak is the last block. As a peak needs a full
width behind it, an append changes that block alone.
"""

from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

NARROWEST = 1 << 20
"""Bytes: the width at a source's start. A block has 1 to 3 widths, 1.9 on average, and the last one up to 4;"""
WIDEST = 8 << 20
"""and the width from 1.5 GiB on."""
SHARE = 192
"""Beyond the narrowest, the width is at most one such part of the bytes that precede a line."""

MAX_LINE = 1 << 30
"""Bytes after which a line without an end is taken for something else than JSON lines."""

READ_AT_ONCE = 4 << 20

Places = npt.NDArray[np.int64]
Ranks = npt.NDArray[np.uint64]


class NoLineEnd(Exception):
    """No line ends within ``MAX_LINE`` bytes."""


class Piece(NamedTuple):
    """The bytes of a block, good until the next is asked for, and how many lines they are."""

    data: memoryview
    lines: int


def width(offset: int) -> int:
    """Return the width, in bytes, for a line that ends ``offset`` bytes from the start of its source."""
    return min(max(NARROWEST, 1 << max((offset // SHARE).bit_length() - 1, 0)), WIDEST)


def cut(file: BinaryIO, before: int = 0) -> Iterator[Piece]:
    """Yield a file block by block; ``before`` is how many bytes of its source come before it.

    Holds a block and a width at once. Raises ``NoLineEnd``.
    """
    window = _Window(file, before)
    while window.fill():
        stop, lines = _block_end(window)
        with memoryview(window.buffer) as view, view[window.begin : window.begin + stop - window.start] as data:
            yield Piece(data, lines)
        window.drop(stop)


class _Window:
    """The part of a file that is looked at: its bytes from ``start`` on, and its lines from a width before that.

    Places are counted from the start of the source.
    """

    def __init__(self, file: BinaryIO, before: int) -> None:
        self.file = file
        self.buffer = bytearray()
        self.begin = 0
        """Where ``start`` lies in the buffer."""
        self.start = self.filled = self.scanned = before
        self.ended = False
        self.ends: Places = np.zeros(0, np.int64)
        """Where each line ends, its line end included."""
        self.ranks: Ranks = np.zeros(0, np.uint64)

    def fill(self) -> bool:
        """Read until it is known whether the next block ends at a peak; return whether there is anything left."""
        while not self.ended and (self.filled <= self.enough or not self._has_line()):
            if self.filled - self.start > MAX_LINE and not self._has_line():
                raise NoLineEnd(f"no line ends within {MAX_LINE:,} bytes")
            self._read(self.enough - self.filled)
            self._scan()
        return self.filled > self.start

    @property
    def enough(self) -> int:
        """Where all is known of the peaks within three widths."""
        furthest = self.start + 3 * width(self.start)
        return furthest + width(furthest)

    def drop(self, stop: int) -> None:
        """Go on at ``stop``."""
        self.begin += stop - self.start
        self.start = stop
        old = int(np.searchsorted(self.ends, stop - width(stop)))
        self.ends, self.ranks = self.ends[old:], self.ranks[old:]

    def _has_line(self) -> bool:
        return len(self.ends) > 0 and int(self.ends[-1]) > self.start

    def _read(self, wanted: int) -> None:
        held = self.filled - self.start
        needed = held + max(wanted, READ_AT_ONCE) + _WORD
        if self.begin + needed > len(self.buffer):
            old, self.buffer = self.buffer, self.buffer if needed <= len(self.buffer) else bytearray(needed * 3 // 2)
            with memoryview(old) as source, memoryview(self.buffer) as target:
                target[:held] = source[self.begin : self.begin + held]
            self.begin = 0
        place = self.begin + held
        with memoryview(self.buffer) as view:
            count = self.file.readinto(view[place : place + READ_AT_ONCE])  # type: ignore[attr-defined]
        self.filled += count
        self.ended = not count

    def _scan(self) -> None:
        """Find the lines that end in what was read last, and rank them."""
        shift = self.start - self.begin
        data = np.frombuffer(self.buffer, np.uint8)
        first = self.scanned - shift
        ends = np.flatnonzero(data[first : self.filled - shift] == ord("\n")) + (first + 1)
        self.scanned = self.filled
        if len(ends):
            begins = np.empty_like(ends)
            begins[0] = (int(self.ends[-1]) if self._has_line() else self.start) - shift
            begins[1:] = ends[:-1]
            self.ends = np.concatenate([self.ends, ends + shift])
            self.ranks = np.concatenate([self.ranks, rank(data, begins, ends - 1)])


_WORD = 8
_MIX = np.uint64(0x9E3779B97F4A7C15)
_KEPT = np.array([(1 << 8 * count) - 1 for count in range(_WORD + 1)], np.uint64)


def rank(data: npt.NDArray[np.uint8], begins: Places, ends: Places) -> Ranks:
    """Return the ranks of the lines ``begins:ends`` of ``data``, which goes on for 8 bytes behind the last.

    A rank is a hash of a line's length and of 24 of its bytes, eight from each quarter mark: enough to tell lines
    apart, and cheap enough to have all of them.
    """
    words: Any = np.ndarray((len(data) - _WORD + 1,), "<u8", buffer=data.data, strides=(1,))
    lengths = ends - begins
    kept = _KEPT[np.minimum(lengths, _WORD)]
    spare = np.maximum(lengths - _WORD, 0)
    ranks = lengths.astype(np.uint64) * _MIX
    for quarter in (1, 2, 3):
        ranks ^= words[begins + spare * quarter // 4] & kept
        ranks *= _MIX
        ranks ^= ranks >> np.uint64(32)
    return np.asarray(ranks, np.uint64)


def _block_end(window: _Window) -> tuple[int, int]:
    """Return where the block at the window's start ends, and how many lines it has."""
    ends, start = window.ends, window.start
    wide = width(start)
    first = int(np.searchsorted(ends, start, "right"))
    last = _first_peak(window, int(np.searchsorted(ends, start + wide)), start + 3 * wide)
    if last is None and not (window.ended and window.filled <= window.enough):
        last = _instead(window, first)
    if last is None or last == len(ends):
        open_line = window.filled > (int(ends[-1]) if len(ends) else 0)
        return window.filled, len(ends) - first + open_line
    return int(ends[last]), last + 1 - first


def _instead(window: _Window, first: int) -> int:
    """Return the line that ends a block without a peak: the highest one that leaves no crumb on either side.

    That is from one to two widths on. Where lines are longer, it is the next one within a block; else the last one
    before the long line; else that one.
    """
    ends, wide = window.ends, width(window.start)
    low, high, most = map(int, np.searchsorted(ends, window.start + wide * np.array([1, 2, 3]), "right"))
    if low < high:
        return low + int(np.argmax(window.ranks[low:high]))
    return high if high < most or low == first else low - 1


def _first_peak(window: _Window, line: int, limit: int) -> int | None:
    """Return the first peak from ``line`` on that ends by ``limit``."""
    ends, ranks = window.ends, window.ranks
    while line < len(ends) and ends[line] <= limit:
        wide = width(int(ends[line]))
        beyond = int(np.searchsorted(ends, ends[line] + wide, "right"))
        highest = line + int(np.argmax(ranks[line:beyond]))
        if highest > line:  # none between is a peak: that one is higher than they, and within their width
            line = highest
            continue
        before = int(np.searchsorted(ends, ends[line] - wide))
        if (before == line or ranks[before:line].max() < ranks[line]) and ends[line] + wide <= window.filled:
            return line
        line = beyond  # none before that is a peak: this one is as high, and within their width
    return None
