"""Masks: from trained characters to trained tokens."""

from collections.abc import Sequence

import numpy as np

from packhouse.worker.control import Span
from packhouse.worker.samples import Mask
from packhouse.worker.token_bytes import TokenBytes


def by_bytes(
    texts: Sequence[str], spans: Sequence[Sequence[Span]], ids: np.ndarray, offsets: np.ndarray, tokens: TokenBytes
) -> tuple[Mask, np.ndarray]:
    """Return which tokens overlap a trained span, and the texts for which that cannot be told so.

    Text ``i`` has the ids ``ids[offsets[i]:offsets[i + 1]]``, and ``spans[i]`` are its trained characters. A text whose
    tokens' bytes do not add up to its own is left untrained and told.
    """
    lengths = np.full(len(texts), -1, np.int64)
    rows: list[int] = []
    borders: list[int] = []
    for row, (text, trained) in enumerate(zip(texts, spans, strict=True)):
        if not tokens.tell(text):
            continue
        if text.isascii():
            lengths[row], places = len(text), [border for span in trained for border in span]
        else:
            lengths[row], places = _in_bytes(text, trained)
        borders += places
        rows += [row] * len(trained)
    sizes = tokens.sizes(ids, offsets, texts)
    ends = np.zeros(len(ids) + 1, np.int64)
    np.cumsum(sizes, out=ends[1:])
    base = ends[offsets[:-1]]
    sound = ends[offsets[1:]] - base == lengths
    of = np.array(rows, np.int64)
    begins, stops = np.array(borders, np.int64).reshape(-1, 2).T
    kept = sound[of] & (stops > begins)
    of, begins, stops = of[kept], begins[kept], stops[kept]
    # A token overlaps [start, stop) when it ends behind start and begins before stop.
    first = np.searchsorted(ends[1:], base[of] + begins, "right")
    behind = np.searchsorted(ends[1:], base[of] + stops, "left") + 1
    # A space that the tokenizer put there belongs to what follows it.
    first -= (first > offsets[of]) & (sizes[first - 1] == 0)
    return _marked(first, behind, len(ids)), np.flatnonzero(~sound)


def _in_bytes(text: str, spans: Sequence[Span]) -> tuple[int, list[int]]:
    """Return how many bytes a text has, and before how many of them each border of its spans stands."""
    places: list[int] = []
    done = place = 0
    for span in spans:
        for border in span:
            place += len(text[done:border].encode())
            done = border
            places.append(place)
    return place + len(text[done:].encode()), places


def _marked(first: np.ndarray, behind: np.ndarray, count: int) -> Mask:
    """Return a mask of ``count`` tokens with those of every ``first:behind`` set."""
    change = np.zeros(count + 1, np.int32)
    np.add.at(change, first, 1)
    np.add.at(change, behind, -1)
    mask: Mask = np.cumsum(change[:-1]) > 0
    return mask


def by_offsets(spans: Sequence[Span], offsets: Sequence[Span]) -> Mask:
    """Return which of the tokens that stand for the characters ``offsets`` overlap a span."""
    places = np.asarray(offsets, np.int64).reshape(-1, 2)
    mask = np.zeros(len(places), np.bool_)
    for begin, stop in spans:
        if stop > begin:
            mask |= (places[:, 0] < stop) & (places[:, 1] > begin)
    return mask
