"""Strategy best_fit: as many packs as a plain best-fit decreasing, and each sample once."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.packing.balance import best_fit_costs
from packhouse.worker.packing.best_fit import best_fit
from packhouse.worker.packing.overlong import piece_counts
from packhouse.worker.packing.pieces import split
from packhouse.worker.packing.segments import costs

Make = Callable[..., Any]


def bins(lengths: Sequence[int], room: int, most: int = 10**9) -> int:
    """Count the bins of best-fit decreasing, one item at a time; a bin of ``most`` items is full."""
    open_bins: list[tuple[int, int]] = []
    for piece in sorted((n for n in lengths if n), reverse=True):
        fitting = [i for i, (space, held) in enumerate(open_bins) if space >= piece and held < most]
        if fitting:
            best = min(fitting, key=lambda i: open_bins[i][0])
            open_bins[best] = open_bins[best][0] - piece, open_bins[best][1] + 1
        else:
            open_bins.append((room - piece, 1))
    return len(open_bins)


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(40, 90))
def test_as_many_packs_as_plain_best_fit_decreasing(lengths: list[int], room: int) -> None:
    packing = best_fit(np.array(lengths, np.int32), np.arange(len(lengths)), room)
    assert packing.packs == bins(lengths, room)
    assert sorted(packing.sample.tolist()) == [i for i, n in enumerate(lengths) if n]


@pytest.mark.parametrize("room", [320, 1000, 4097])
@pytest.mark.parametrize("most", [3, 10**9])
def test_as_many_packs_for_many_samples(tokens: Make, room: int, most: int) -> None:
    lengths = np.minimum(np.random.default_rng(room).lognormal(3.5, 1.2, 700), room).astype(np.int32)
    packing = best_fit(lengths, np.arange(700), room, most)
    # With a bound on segments several bins of one room may differ in them, and ties show.
    assert abs(packing.packs - bins(lengths.tolist(), room, most)) <= (2 if most == 3 else 0)
    assert np.diff(packing.offsets).max() <= most


@pytest.mark.parametrize(("room", "count"), [(9, 2), (8, 2), (17, 1)])
def test_it_packs_at_any_pack_length(tokens: Make, room: int, count: int) -> None:
    assert best_fit(tokens([5, 4, 4, 3]), np.arange(4), room).packs == count


@pytest.mark.parametrize(
    ("lengths", "room", "packs"), [([2, 2, 1], 5, 1), ([3, 3, 7, 7], 10, 2), ([5] * 5, 10, 3), ([3, 8, 5], 8, 2)]
)
def test_what_fits_exactly_is_joined(tokens: Make, lengths: list[int], room: int, packs: int) -> None:
    packing = best_fit(tokens(lengths), np.arange(len(lengths)), room)
    assert packing.packs == packs
    assert sorted(packing.sample.tolist()) == list(range(len(lengths)))


def test_split_cuts_into_full_pieces_and_a_rest(tokens: Make) -> None:
    lengths = tokens([5, 0, 3, 8])
    sizes, pieces = split(lengths, 4)
    assert pieces is not None
    assert sizes.tolist() == [1, 0, 3, 4, 4, 4]
    assert pieces.whole(sizes).tolist() == [5, 0, 3, 8]
    order = pieces.of(np.array([3, 1, 0]))
    assert order.tolist() == [5, 3, 1, 4, 0]
    columns = pieces.cuts(order, lengths)
    assert [column.tolist() for column in columns] == [[3, 3, 1, 0, 0], [0, 4, 0, 0, 4], [4, 4, 0, 4, 1]]
    assert split(tokens([4, 0, 3]), 4)[1] is None
    assert piece_counts(lengths, 4).tolist() == [0, 1, 0, 1, 3]


def test_a_shuffle_orders_the_packs_and_changes_none(tokens: Make, samples: Make) -> None:
    lengths = tokens([9, 1, 7, 3, 8, 2, 6, 4, 5, 5])
    natural = samples(best_fit(lengths, np.arange(10), 10))
    order = np.array([3, 0, 4, 1, 2])
    assert samples(best_fit(lengths, np.arange(10), 10, shuffle=lambda count: order[:count])) == [
        natural[i] for i in order
    ]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60))
def test_the_memory_of_the_order_may_be_used_for_the_packs(lengths: list[int]) -> None:
    array, order = np.array(lengths, np.int32), np.arange(len(lengths), dtype=np.int32)[::-1].copy()
    packing = best_fit(array, order.copy(), 32)
    within = best_fit(array, order, 32, out=order)
    assert (within.offsets.tolist(), within.sample.tolist()) == (packing.offsets.tolist(), packing.sample.tolist())
    assert np.shares_memory(within.sample, order) == any(lengths)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_costs_are_told_from_the_histogram_alone(lengths: list[int]) -> None:
    spec, array = PlanSpec(datasets=["a"], pack_length=32), np.array(lengths, np.int32)
    _, cost = costs(best_fit(array, np.arange(len(lengths)), 32), array, spec.cost.token, spec.cost.square)
    assert sorted(best_fit_costs(piece_counts(array, 32), spec)) == sorted(cost)
