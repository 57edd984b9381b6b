"""The kernel: one pass that copies the segments of many packs into flat arrays of ids, labels, positions and borders.

There are two with equal results: one compiled by numba (``compiled.py``), and one of NumPy calls, a few for each
segment, for installs without numba. Which one runs is logged and can be read from ``PackBuilder.kernel``.
"""

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from packhouse.client.errors import InvalidRequest
from packhouse.client.format import Shard
from packhouse.client.plan import Int32, Int64
from packhouse.client.shards import OpenShards

IGNORE = -100
"""Label of a token that is not trained."""

KernelName = Literal["auto", "numba", "numpy"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of N packs, in order; pack ``i`` has ``offsets[i]:offsets[i + 1]``, with no gap between them."""

    offsets: Int64
    """(N + 1,), from 0"""
    shard: Int64
    row: Int64
    start: Int32
    """tokens from the start of the sample"""
    length: Int32
    """tokens, at least 1"""


@dataclass(frozen=True, slots=True)
class Flat:
    """N packs of P tokens end to end."""

    input_ids: Int64
    labels: Int64
    positions: Int64
    cu_seqlens: Int32
    """The borders of all packs, each from 0 to P."""
    longest: Int32
    """(N,): tokens of the longest segment, the padding tail counted as one."""

    @classmethod
    def empty(cls, packs: int, length: int, borders: int) -> "Flat":
        """Return arrays of these sizes whose content is still open."""
        ids, labels, positions = np.empty((3, packs * length), np.int64)
        return cls(ids, labels, positions, np.empty(borders, np.int32), np.empty(packs, np.int32))


class Fill(Protocol):
    """A kernel."""

    def __call__(
        self, segments: Segments, shards: OpenShards, length: int, sample_end: int, pad_id: int, out: Flat
    ) -> int:
        """Write packs of ``length`` tokens to ``out``; return the first segment that its sample does not hold, or -1.

        A label is the next token of the sample while that lies before ``sample_end`` and its mask is on, else -100.
        """


def load(name: KernelName = "auto") -> tuple[str, Fill]:
    """Return the kernel ``name`` and what it is; ``auto`` takes the compiled one where numba is installed.

    Raises ``InvalidRequest`` for a compiled one without numba.
    """
    if name == "numba" or (name == "auto" and find_spec("numba") is not None):
        try:
            from packhouse.client.compiled import fill
        except ModuleNotFoundError:
            raise InvalidRequest("kernel 'numba' is not installed", "pip install 'packhouse[fast]'") from None
        log.info("packs are built by the compiled kernel")
        return "numba", fill
    if name == "auto":
        log.warning("packs are built by NumPy, two to four times slower: pip install 'packhouse[fast]'")
    return "numpy", numpy_fill


def numpy_fill(segments: Segments, shards: OpenShards, length: int, sample_end: int, pad_id: int, out: Flat) -> int:
    """Write the packs by NumPy: slice copies for each segment, whole-array work for labels and positions."""
    counts, tokens = np.diff(segments.offsets), _sums(segments)
    starts = _starts(segments, counts, length)
    packs = np.arange(len(counts), dtype=np.int64) * length
    out.input_ids.fill(pad_id)
    wrong, trained, following = _copy(segments, shards, starts, sample_end, out)
    if wrong >= 0:
        return wrong
    labels = out.labels
    labels[:-1] = out.input_ids[1:]
    if trained is not None:
        np.putmask(labels[:-1], ~trained[1:], IGNORE)
    labels[starts + segments.length - 1] = following
    padded = tokens < length
    tails = (packs + tokens)[padded]
    for tail in tails.tolist():
        labels[tail : tail + length - tail % length] = IGNORE
    borders = np.sort(np.concatenate([starts, tails, [len(labels)]]))
    sizes = np.diff(borders)
    np.subtract(np.arange(len(labels)), np.repeat(borders[:-1], sizes), out=out.positions)
    _borders(borders, sizes, counts + padded, length, out)
    return -1


def _copy(
    segments: Segments, shards: OpenShards, starts: Int64, sample_end: int, out: Flat
) -> tuple[int, npt.NDArray[np.bool_] | None, Int64]:
    """Write the ids; return the first segment that cannot be, or -1, the mask if there is one, and the last labels."""
    trained: npt.NDArray[np.bool_] | None = None
    following = np.full(len(starts), IGNORE, np.int64)
    columns = segments.shard, segments.row, segments.start, segments.length, starts
    for i, (number, row, start, n, at) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        shard = shards[number]
        base, end = int(shard.offsets[row]), int(shard.offsets[row + 1])
        left, right = base + start, base + start + n
        if right > end:
            return i, trained, following
        out.input_ids[at : at + n] = shard.input_ids[left:right]
        if shard.mask_bits is not None:
            if trained is None:
                trained = np.ones(len(out.input_ids), np.bool_)
            trained[at : at + n] = shard.mask(left, right)
        if right < min(end, base + sample_end):
            following[i] = _label(shard, right)
    return -1, trained, following


def _label(shard: Shard, at: int) -> int:
    trained = shard.mask_bits is None or shard.mask_bits[at >> 3] >> (at & 7) & 1
    return int(shard.input_ids[at]) if trained else IGNORE


def _sums(segments: Segments) -> Int64:
    ends = np.zeros(len(segments.length) + 1, np.int64)
    np.cumsum(segments.length, out=ends[1:])
    return np.diff(ends[segments.offsets])


def _starts(segments: Segments, counts: npt.NDArray[np.int64], length: int) -> Int64:
    """Return where each segment starts when the packs lie end to end."""
    ends = np.zeros(len(segments.length) + 1, np.int64)
    np.cumsum(segments.length, out=ends[1:])
    shift = np.arange(len(counts), dtype=np.int64) * length - ends[segments.offsets[:-1]]
    return ends[:-1] + np.repeat(shift, counts)


def _borders(borders: Int64, sizes: Int64, counts: Int64, length: int, out: Flat) -> None:
    """Write the borders and longest segment of each pack, which has ``counts`` of the pieces between ``borders``."""
    first = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=first[1:])
    within = np.repeat(np.arange(len(counts)) * length, counts + 1)
    places = np.arange(len(out.cu_seqlens)) - np.repeat(np.arange(len(counts)), counts + 1)
    out.cu_seqlens[:] = borders[places] - within
    out.longest[:] = np.maximum.reduceat(sizes, first[:-1]) if len(counts) else 0
