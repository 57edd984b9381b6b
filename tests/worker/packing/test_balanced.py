"""Strategy balanced: full packs, equal cost over the ranks, steps that stay random."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhouse.worker.packing.balance import balance
from packhouse.worker.packing.balanced import balanced, deal_to_ranks
from packhouse.worker.packing.segments import Packing, costs
from packhouse.worker.packing.shuffle import shuffled

Make = Callable[..., Any]


def shuffle(count: int, *key: int) -> Any:
    return shuffled(count, 0, 0, *key)


def chats(count: int, longest: int) -> Any:
    lengths = np.random.default_rng(5).lognormal(np.log(500), 1.2, count).astype(np.int32) + 1
    return np.minimum(lengths, longest).astype(np.int32)


@given(
    lengths=st.lists(st.integers(0, 40), max_size=120),
    ranks=st.integers(1, 4),
    micro=st.integers(1, 3),
    most=st.sampled_from([None, 1, 3]),
)
def test_each_sample_is_in_a_pack_or_left_and_no_pack_is_too_long(
    lengths: list[int], ranks: int, micro: int, most: int | None
) -> None:
    array = np.array(lengths, np.int32)
    packing, left = balanced(array, shuffled(len(array), 0, 0), 40, ranks, micro, shuffle, most)
    assert packing.packs % (ranks * micro) == 0
    kept = np.concatenate([packing.sample, left[array[left] > 0]])
    assert sorted(kept.tolist()) == [i for i, n in enumerate(lengths) if n]
    sizes = np.diff(packing.offsets)
    assert ((sizes > 0) & (sizes <= (most or 40))).all()
    assert (costs(packing, array, 1, 0)[0] <= 40).all()


def test_packs_are_full_and_ranks_even() -> None:
    lengths, ranks, micro = chats(60_000, 8192), 8, 4
    packing, left = balanced(lengths, shuffled(len(lengths), 0, 0), 8192, ranks, micro, shuffle)
    before = costs(packing, lengths, 24576, 1)[1]
    deal_to_ranks(packing, lengths, ranks, micro, 24576, 1)
    tokens, cost = costs(packing, lengths, 24576, 1)
    steps = (-1, ranks * micro)
    assert (np.sort(cost.reshape(steps)) == np.sort(before.reshape(steps))).all()
    assert tokens.sum() / (packing.packs * 8192) > 0.9999
    assert lengths[left].sum() < 2 * ranks * micro * 8192
    even = balance(cost, ranks, micro)
    assert even.micro_mean < 1.003
    assert even.step_mean < 1.002


def test_samples_too_long_to_share_a_pack_get_one_each() -> None:
    lengths = np.full(100, 60, np.int32)
    packing, left = balanced(lengths, np.arange(100), 100, 4, 2, shuffle)
    assert packing.packs + len(left) == 100
    assert len(left) < 8


def test_each_step_takes_a_group_of_each_stratum() -> None:
    lengths, ranks, micro = chats(4000, 2048), 4, 3
    packing, _ = balanced(lengths, shuffled(4000, 0, 0), 2048, ranks, micro, shuffle)
    leaders = np.maximum.reduceat(lengths[packing.sample], packing.offsets[:-1]).reshape(-1, micro, ranks)
    ranked = np.sort(leaders.max(axis=2).reshape(-1))[::-1]
    steps = len(leaders)
    for step in leaders.max(axis=2):
        for stratum, leader in enumerate(sorted(step.tolist(), reverse=True)):
            part = ranked[stratum * steps : (stratum + 1) * steps]
            assert part.min() <= leader <= part.max()


def test_the_costliest_pack_goes_to_the_rank_with_least() -> None:
    # Groups (9, 1) and (5, 4) of one step: rank 0 has 9 + 4, rank 1 has 1 + 5.
    packing = Packing(np.array([0, 2, 3, 4, 5]), np.array([0, 4, 1, 2, 3]))
    deal_to_ranks(packing, np.array([7, 1, 5, 4, 2], np.int32), 2, 2, token=1, square=0)
    assert (packing.offsets.tolist(), packing.sample.tolist()) == ([0, 2, 3, 4, 5], [0, 4, 3, 1, 2])


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_wide_numbers_of_samples_change_nothing(kind: type[np.int64]) -> None:
    lengths = chats(3000, 1024)
    order = shuffled(3000, 0, 0).astype(kind)
    packing, left = balanced(lengths, order, 1024, 2, 2, partial(shuffle))
    narrow, narrow_left = balanced(lengths, order.astype(np.int32), 1024, 2, 2, shuffle)
    assert packing.sample.tolist() == narrow.sample.tolist()
    assert left.tolist() == narrow_left.tolist()
