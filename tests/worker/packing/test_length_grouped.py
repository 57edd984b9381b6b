"""Sampler length_grouped: XTuner's order where groups are whole, and every full group whole where they are not."""

import random
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from packhouse.worker.packing.length_grouped import by_rank, length_grouped

RANK_0 = [22, 3, 6, 4, 13, 27, 34, 31, 2, 8, 16, 26, 33, 25, 19, 24, 9, 18]
RANK_1 = [35, 28, 20, 5, 1, 29, 10, 32, 15, 11, 17, 14, 23, 30, 7, 0, 12, 21]


def in_order(count: int, stretch: int) -> Any:
    return np.arange(count)


def test_it_gives_the_order_of_xtuner_for_the_same_permutations() -> None:
    cost = np.array([i * 7919 % 1000 for i in range(36)])
    order = torch.randperm(36, generator=torch.Generator().manual_seed(3)).numpy()
    generator = random.Random(3)

    def shuffle(count: int, stretch: int) -> Any:
        groups = list(range(count))
        generator.shuffle(groups)
        return np.array(groups)

    grouped = length_grouped(cost, order, ranks=2, micro_batches=2, shuffle=shuffle)
    assert grouped[0::2].tolist() == RANK_0
    assert grouped[1::2].tolist() == RANK_1


def test_a_short_group_comes_last() -> None:
    cost = np.array([9, 9, 5, 5, 1])
    grouped = length_grouped(cost, np.arange(5), 2, 1, lambda count, stretch: np.arange(count)[::-1])
    assert cost[grouped].tolist() == [9, 9, 5, 5, 1] or cost[grouped].tolist() == [5, 5, 9, 9, 1]


@given(st.lists(st.integers(0, 99), max_size=80), st.integers(1, 5), st.integers(1, 3))
def test_each_pack_is_there_once_and_groups_are_alike(costs: list[int], ranks: int, micro: int) -> None:
    cost = np.array(costs, np.int64)
    grouped = length_grouped(cost, np.arange(len(cost)), ranks, micro, in_order)
    assert sorted(grouped.tolist()) == list(range(len(cost)))
    quarter = len(cost) // (4 * ranks * micro)
    stretch = (quarter if quarter > 1 else 4) * ranks * micro
    for first in range(0, len(cost) // stretch * stretch, stretch):
        part = np.sort(cost[first : first + stretch])[::-1]
        assert cost[grouped[first : first + stretch]].tolist() == part.tolist()


def test_a_ranks_packs_lie_side_by_side() -> None:
    assert by_rank(12, ranks=3, micro_batches=2).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
