"""What the tests of strategies share: lengths as an array, and packs as lists."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from packhouse.worker.packing.segments import Int32, Packing

Rows = list[list[tuple[int, int, int]]]


@pytest.fixture(scope="session")
def tokens() -> Callable[[Sequence[int]], Int32]:
    """Return lengths as strategies take them."""
    return lambda lengths: np.array(lengths, np.int32)


@pytest.fixture(scope="session")
def rows() -> Callable[[Packing, Any], Rows]:
    """Return the packs of a packing, each a list of (sample, start, length)."""

    def unpacked(packing: Packing, lengths: Any) -> Rows:
        columns = packing.cuts(np.asarray(lengths, np.int32))
        flat = list(zip(*(column.tolist() for column in columns), strict=True))
        return [flat[a:b] for a, b in pairwise(packing.offsets.tolist())]

    return unpacked


@pytest.fixture(scope="session")
def samples() -> Callable[[Packing], list[list[int]]]:
    """Return the samples of each pack."""
    return lambda packing: [packing.sample[a:b].tolist() for a, b in pairwise(packing.offsets.tolist())]
