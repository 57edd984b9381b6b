"""Samples: what a block becomes, as flat arrays."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from packhouse.worker.records import Reject

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(slots=True)
class Samples:
    """The samples of a block; sample ``i`` is ``ids[offsets[i]:offsets[i + 1]]``."""

    ids: np.ndarray[tuple[int], np.dtype[np.uint32]]
    """uint32, tokens."""
    offsets: np.ndarray[tuple[int], np.dtype[np.int64]]
    """int64, samples + 1."""
    mask: Mask | None
    """bool, tokens; None when every token is trained."""
    rows: np.ndarray[tuple[int], np.dtype[np.int32]]
    """int32, samples: line of each in its block, from 0."""
    records: int = 0
    rejects: list[Reject] = field(default_factory=list)
    dropped: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Slower paths taken: 'engine' and 'renderer' by block, 'offsets' by row."""
    audited: int = 0
    engine: str = ""
    split: int = 0
    """Records that became several samples."""
    fragments: int = 0
    """Samples that those became."""
    places: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None
    """int64, samples: tokens of its record before each; None when samples are not split."""
    extra: pa.StructArray | None = None
    """Extra columns, a row a sample; None when the recipe states none."""


def join(parts: Sequence[Samples], *, masked: bool) -> Samples:
    """Return the samples of several parts as one."""
    if len(parts) == 1:
        return parts[0]
    counts = [np.diff(part.offsets) for part in parts]
    offsets = np.zeros(1 + sum(map(len, counts)), np.int64)
    np.cumsum(np.concatenate([np.zeros(0, np.int64), *counts]), out=offsets[1:])
    ids = np.concatenate([np.zeros(0, np.uint32), *(part.ids for part in parts)])
    rows = np.concatenate([np.zeros(0, np.int32), *(part.rows for part in parts)])
    masks = [part.mask for part in parts if part.mask is not None]
    mask = np.concatenate([np.zeros(0, np.bool_), *masks]) if masked else None
    return Samples(ids, offsets, mask, rows)
