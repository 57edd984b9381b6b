"""Masks: from trained characters to trained tokens."""

import unicodedata
from collections.abc import Sequence

import numpy as np

from packhouse.worker.control import Span
from packhouse.worker.samples import Mask


def by_bytes(text: str, spans: Sequence[Span], ends: np.ndarray, base: int, row: Mask, *, nfc: bool) -> bool:
    """Mark ``row`` by the tokens' byte lengths; return False if those do not add up to ``text``."""
    ascii_only = text.isascii()
    if nfc and not ascii_only and not unicodedata.is_normalized("NFC", text):
        return False
    size = len(text) if ascii_only else len(text.encode())
    if size != (int(ends[-1]) - base if len(ends) else 0):
        return False
    done = place = 0  # characters and bytes up to the last border
    for span in spans:
        borders = []
        for border in span:
            place += border - done if ascii_only else len(text[done:border].encode())
            done = border
            borders.append(base + place)
        # A token overlaps [start, end) when it ends behind start and begins before end.
        first, last = np.searchsorted(ends, borders[0], "right"), np.searchsorted(ends, borders[1], "left")
        if span[1] > span[0]:
            row[first : last + 1] = True
    return True


def by_offsets(spans: Sequence[Span], offsets: Sequence[Span]) -> Mask:
    """Return which of the tokens that stand for the characters ``offsets`` overlap a span."""
    places = np.asarray(offsets, np.int64).reshape(-1, 2)
    mask = np.zeros(len(places), np.bool_)
    for begin, stop in spans:
        mask |= (places[:, 0] < stop) & (places[:, 1] > begin)
    return mask
