"""Strategies: golden cases, best-fit decreasing against a plain one, and what holds for all of them."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhouse.worker.packing.best_fit import best_fit
from packhouse.worker.packing.compiled import compiled
from packhouse.worker.packing.internevo import internevo
from packhouse.worker.packing.segments import Packing, costs, joined
from packhouse.worker.packing.shuffle import PACKS, SAMPLES, mix, shuffled

Rows = list[list[tuple[int, int, int]]]

LENGTHS = st.lists(st.integers(0, 40), max_size=60)


def packs(packing: Packing) -> Rows:
    rows = list(zip(packing.sample.tolist(), packing.start.tolist(), packing.length.tolist(), strict=True))
    return [rows[a:b] for a, b in pairwise(packing.offsets.tolist())]


def segments(packing: Packing) -> list[tuple[int, int, int]]:
    return sorted(segment for pack in packs(packing) for segment in pack)


def array(lengths: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(lengths, np.int32)


def sizes(packing: Packing) -> list[list[int]]:
    return sorted(sorted(length for _, _, length in pack) for pack in packs(packing))


def plain_best_fit(lengths: Sequence[int], room: int) -> int:
    """Count the bins of best-fit decreasing, one item at a time."""
    bins: list[int] = []
    pieces = [piece for n in lengths for piece in [room] * (n // room) + [n % room] * (n % room > 0)]
    for piece in sorted(pieces, reverse=True):
        fitting = [i for i, space in enumerate(bins) if space >= piece]
        if fitting:
            bins[min(fitting, key=lambda i: bins[i])] -= piece
        else:
            bins.append(room - piece)
    return len(bins)


@given(LENGTHS, st.integers(1, 45))
def test_best_fit_needs_as_many_packs_as_plain_best_fit_decreasing(lengths: list[int], room: int) -> None:
    assert best_fit(array(lengths), room).packs == plain_best_fit(lengths, room)


@pytest.mark.parametrize("room", [7, 64, 1000, 4097])
def test_best_fit_needs_as_many_packs_for_many_samples(room: int) -> None:
    lengths = np.random.default_rng(room).lognormal(3.5, 1.2, 700).astype(np.int32)
    assert best_fit(lengths, room).packs == plain_best_fit(lengths.tolist(), room)


@pytest.mark.parametrize(("room", "count"), [(9, 2), (8, 2), (17, 1)])
def test_best_fit_packs_at_any_pack_length(room: int, count: int) -> None:
    assert best_fit(array([5, 4, 4, 3]), room).packs == count


def test_best_fit_joins_what_fits_exactly() -> None:
    assert sizes(best_fit(array([2, 2, 1]), 5)) == [[1, 2, 2]]


def test_best_fit_splits_a_sample_longer_than_a_pack() -> None:
    packing = best_fit(array([4, 2, 3, 1]), 3)
    assert sizes(packing) == [[1], [1, 2], [3], [3]] or sizes(packing) == [[1, 1], [2], [3], [3]]
    assert segments(packing) == [(0, 0, 3), (0, 3, 1), (1, 0, 2), (2, 0, 3), (3, 0, 1)]


def test_a_sample_without_tokens_moves_no_other() -> None:
    assert segments(best_fit(array([5, 0, 3]), 4)) == [(0, 0, 4), (0, 4, 1), (2, 0, 3)]


def test_samples_of_one_length_are_all_packed() -> None:
    packing = best_fit(array([5] * 5), 10)
    assert packing.packs == 3
    assert sorted(packing.sample.tolist()) == [0, 1, 2, 3, 4]


def test_internevo_cuts_at_pack_ends_and_keeps_the_tail() -> None:
    assert packs(internevo(array([4, 7, 8, 5]), 16, 8)) == [
        [(0, 0, 4), (1, 0, 7), (2, 0, 5)],
        [(2, 5, 3), (3, 0, 5)],
    ]


def test_internevo_cuts_a_stretch_at_seq_len() -> None:
    assert packs(internevo(array([22]), 16, 8)) == [[(0, 0, 8), (0, 8, 8)], [(0, 16, 6)]]
    assert packs(internevo(array([3, 20]), 16, 8)) == [[(0, 0, 3), (1, 0, 8), (1, 8, 5)], [(1, 13, 7)]]


@pytest.mark.parametrize("strategy", [best_fit, partial(internevo, seq_len=5)])
@given(lengths=LENGTHS, room=st.integers(5, 45))
def test_every_token_is_packed_once_and_no_pack_is_too_long(
    strategy: partial[Packing], lengths: list[int], room: int
) -> None:
    packing = strategy(array(lengths), room)
    tokens = Counter(
        (sample, token)
        for pack in packs(packing)
        for sample, start, length in pack
        for token in range(start, start + length)
    )
    assert tokens == Counter((i, token) for i, n in enumerate(lengths) for token in range(n))
    assert all(0 < sum(length for _, _, length in pack) <= room for pack in packs(packing))
    assert (packing.length > 0).all()


def test_a_shuffle_orders_the_packs_and_changes_none() -> None:
    lengths = array([9, 1, 7, 3, 8, 2, 6, 4, 5, 5])
    natural = packs(best_fit(lengths, 10))
    order = np.array([3, 0, 4, 1, 2])
    assert packs(best_fit(lengths, 10, lambda count: order[:count])) == [natural[i] for i in order]


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


def test_seed_epoch_and_purpose_each_give_another_order() -> None:
    orders = [shuffled(50, *key).tolist() for key in [(0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 2)]]
    assert len({tuple(order) for order in orders}) == 4


def test_costs_are_sums_over_segments() -> None:
    tokens, cost = costs(np.array([0, 2, 2, 3]), array([2, 3, 2**20]), 10, 1)
    assert tokens.tolist() == [5, 0, 2**20]
    assert cost.tolist() == [10 * 5 + 4 + 9, 0, 10 * 2**20 + 2**40]


def test_a_kernel_that_cannot_be_cached_is_compiled_all_the_same() -> None:
    names: dict[str, Any] = {}
    exec("def double(x):\n    return 2 * x", names)
    with pytest.raises(RuntimeError, match="cannot cache"):
        numba.njit(cache=True)(names["double"])
    assert compiled(names["double"])(21) == 42


def test_parts_join_in_order() -> None:
    one, two = internevo(array([4, 3]), 5, 5), best_fit(array([2, 2]), 3)
    assert packs(joined([one, two])) == packs(one) + packs(two)
