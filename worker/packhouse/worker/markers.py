"""Markers: what a template writes before and behind an assistant's turn, and the turns that they tell."""

from dataclasses import dataclass
from functools import cached_property

from packhouse.worker.control import Span


@dataclass(frozen=True)
class Markers:
    """What a template writes right before and right behind an assistant's turn."""

    header: str
    end: str

    @cached_property
    def end_overlaps(self) -> bool:
        """Whether two end markers can overlap."""
        return any(self.end.startswith(self.end[start:]) for start in range(1, len(self.end)))


def find_turns(text: str, markers: Markers) -> list[Span] | None:
    """Return what stands between headers and end markers, both found in order, the end marker included.

    None when a turn has no end, or when there is more than one way to read the text: a header within a turn, or an end
    marker that overlaps another.
    """
    header, end = markers.header, markers.end
    turns: list[Span] = []
    found = text.find(header)
    while found >= 0:
        start = found + len(header)
        stop = text.find(end, start)
        found = text.find(header, found + 1)
        if stop < 0 or 0 <= found <= stop + len(end) - len(header):
            return None
        if markers.end_overlaps and text.find(end, stop + 1, stop + 2 * len(end) - 1) >= 0:
            return None
        stop += len(end)
        if 0 <= found < stop:  # it begins in the end marker, and does not end there
            found = text.find(header, stop)
        turns.append((start, stop))
    return turns


def common_prefix(texts: list[str]) -> str:
    """Return the longest text that all of ``texts`` begin with."""
    first, last = min(texts), max(texts)
    length = next((index for index, letter in enumerate(first) if letter != last[index]), len(first))
    return first[:length]
