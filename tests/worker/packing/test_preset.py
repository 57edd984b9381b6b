"""Strategy preset: XTuner's files in, the same packs out, and back."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
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


def saved(array: npt.ArrayLike) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


CLAIMING = saved(np.zeros(10**6, np.int64))[:128]
"""A header of an array that is not there."""


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("boundaries.npy", saved([[0, 1]]), r"it has the shape \(1, 2\)"),
        ("boundaries.npy", saved(3), r"it has the shape \(\)"),
        ("boundaries.npy", CLAIMING, r"it does not hold \(1000000,\) numbers"),
        ("boundaries.npy", CLAIMING.replace(b"(1000000,)", b"(-100000,)"), "it does not hold"),
        ("samples.npy", saved(np.arange(6)), r"it has the shape \(6,\)"),
        ("samples.npy", saved(np.zeros((1, 6))), "according to the rule 'safe'"),
        ("order.npy", b"PK\x03\x04", r"order\.npy of the preset cannot be read"),
        ("paths.json", b"[" * 100_000, r"paths\.json of the preset cannot be read"),
        ("paths.json", b'{"a": 1}', "not a list of names"),
    ],
)
def test_files_that_claim_what_they_are_not_are_refused(
    memory_store: Make, name: str, data: bytes, message: str
) -> None:
    good = {"boundaries.npy": saved([0, 3]), "samples.npy": saved(ROWS), "paths.json": b'["a", "b"]'}
    put_preset(memory_store(), good)
    with pytest.raises(InvalidRequest, match=message):
        put_preset(memory_store(), {**good, name: data})
