"""Strategy preset: XTuner's files in, the same packs out, and back."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from packhouse.client.errors import InvalidRequest, NotFound
from packhouse.worker.packing.preset import preset, put_preset, read_preset

Make = Callable[..., Any]

LENGTHS, BOUNDS = np.array([5, 3, 8], np.int32), [0, 2, 3]
ROWS = np.array([[0, 1, -1, -1, 0, 3], [1, 0, -1, -1, 2, 8], [0, 0, -1, -1, 0, 5]])


def test_rows_name_samples_of_datasets_and_order_their_packs(rows: Make) -> None:
    packs = rows(preset(np.array([0, 2, 3]), ROWS, np.array([1, 0]), LENGTHS, BOUNDS), LENGTHS)
    assert packs == [[(0, 0, 5)], [(1, 0, 3), (2, 2, 6)]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([2, 0, -1, -1, 0, 1], "row 0 of the preset names a path over the 2 datasets"),
        ([0, 2, -1, -1, 0, 1], "row 0 of the preset names a sample over"),
        ([0, 1, -1, -1, 0, 4], "row 0 of the preset has tokens over"),
        ([0, 1, -1, -1, 2, 2], "row 0 of the preset has tokens over"),
    ],
)
def test_rows_that_name_nothing_are_refused(row: list[int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        preset(np.array([0, 1]), np.array([row]), np.array([0]), LENGTHS, BOUNDS)


def test_an_order_over_the_packs_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="place 1 of the preset's order names no pack"):
        preset(np.array([0, 3]), ROWS, np.array([0, 1]), LENGTHS, BOUNDS)
    with pytest.raises(InvalidRequest, match="boundaries do not fit"):
        preset(np.array([0, 2]), ROWS, np.array([0]), LENGTHS, BOUNDS)


def test_files_that_are_not_a_preset_are_refused(memory_store: Make) -> None:
    store = memory_store()
    with pytest.raises(InvalidRequest, match="a preset has the files"):
        put_preset(store, {"boundaries.npy": b""})
    with pytest.raises(InvalidRequest, match=r"boundaries\.npy of the preset cannot be read"):
        put_preset(store, {"boundaries.npy": b"x", "samples.npy": b"x", "paths.json": b"[]"})
    with pytest.raises(NotFound, match="there is no preset abc"):
        read_preset(store, "abc")
    assert store.files == {}
