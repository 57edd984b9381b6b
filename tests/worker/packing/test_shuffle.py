"""Shuffles that never change, and the passes over segments."""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhouse.worker.packing.compiled import compiled
from packhouse.worker.packing.segments import Packing, costs, joined, narrow
from packhouse.worker.packing.shuffle import PACKS, SAMPLES, first_shuffled, mix, shuffled

Make = Callable[..., Any]


@given(st.integers(0, 2000), st.integers(0, 2**63 - 1), st.integers(0, 9))
def test_a_shuffle_is_a_permutation_by_key(count: int, seed: int, epoch: int) -> None:
    order = shuffled(count, seed, epoch, SAMPLES)
    state = mix((mix((mix(seed) + epoch) % 2**64) + SAMPLES) % 2**64)
    golden = 0x9E3779B97F4A7C15
    keys = [mix((state + i * golden) % 2**64) for i in range(count)]
    assert order.tolist() == sorted(range(count), key=keys.__getitem__)


def test_shuffles_never_change() -> None:
    assert mix(0) == 0xE220A8397B1DCDAF
    assert shuffled(8, 0, 0, SAMPLES).tolist() == [3, 6, 0, 7, 4, 2, 5, 1]
    assert shuffled(8, 2**63 - 1, 3, PACKS).tolist() == [2, 7, 3, 5, 6, 1, 0, 4]
    assert shuffled(8, None, 3, PACKS).tolist() == list(range(8))


@given(st.integers(0, 600), st.integers(0, 600), st.integers(0, 9))
def test_the_first_of_a_shuffle_are_told_without_the_others(count: int, most: int, seed: int) -> None:
    assert first_shuffled(count, most, seed, 0, PACKS).tolist() == shuffled(count, seed, 0, PACKS)[:most].tolist()


def test_seed_epoch_and_purpose_each_give_another_order() -> None:
    orders = [shuffled(50, *key).tolist() for key in [(0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 2), (0, 0, 1, 0)]]
    assert len({tuple(order) for order in orders}) == 5


def test_numbers_of_samples_are_narrow_where_they_can_be() -> None:
    assert (narrow(2**31 - 1), narrow(2**31)) == (np.int32, np.int64)
    assert shuffled(3, 0).dtype == np.int32


def test_costs_are_sums_over_segments() -> None:
    packing = Packing(np.array([0, 2, 2, 3]), np.array([1, 0, 2]))
    tokens, cost = costs(packing, np.array([3, 2, 2**20], np.int32), 10, 1)
    assert tokens.tolist() == [5, 0, 2**20]
    assert cost.tolist() == [10 * 5 + 4 + 9, 0, 10 * 2**20 + 2**40]


def test_parts_join_in_order(tokens: Make, rows: Make) -> None:
    lengths = tokens([4, 3])
    whole = Packing(np.array([0, 1, 2]), np.array([1, 0]))
    cut = Packing(np.array([0, 1]), np.array([0]), tokens([1]), tokens([2]))
    assert rows(joined([whole, cut], lengths), lengths) == [[(1, 0, 3)], [(0, 0, 4)], [(0, 1, 2)]]
    assert joined([whole, whole], lengths).start is None


def test_packs_are_taken_in_any_order_with_empty_ones(tokens: Make, rows: Make) -> None:
    lengths = tokens([4, 3, 2])
    packing = Packing(np.array([0, 2, 3]), np.array([0, 1, 2]))
    assert rows(packing.take(np.array([1, -1, 0])), lengths) == [[(2, 0, 2)], [], [(0, 0, 4), (1, 0, 3)]]
    assert rows(packing.head(1).padded(2), lengths) == [[(0, 0, 4), (1, 0, 3)], []]


def test_a_kernel_that_cannot_be_cached_is_compiled_all_the_same() -> None:
    names: dict[str, Any] = {}
    exec("def double(x):\n    return 2 * x", names)
    with pytest.raises(RuntimeError, match="cannot cache"):
        numba.njit(cache=True)(names["double"])
    assert compiled(names["double"])(21) == 42
