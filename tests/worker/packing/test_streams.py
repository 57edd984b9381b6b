"""Strategies none, soft, hard, internevo and internevo_unpacked: their peers' results for the same order."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhouse.worker.packing.hard import hard
from packhouse.worker.packing.internevo import internevo
from packhouse.worker.packing.internevo_unpacked import internevo_unpacked
from packhouse.worker.packing.none import none
from packhouse.worker.packing.segments import costs, joined
from packhouse.worker.packing.shuffle import shuffled
from packhouse.worker.packing.soft import soft

Make = Callable[..., Any]

# Lengths and orders that XTuner was run with, and what it made of them.
LENGTHS = [10, 47, 84, 121, 158, 195, 232, 39, 76, 113, 150, 187]
SOFT_ORDER = np.array([5, 2, 4, 7, 1, 9, 11, 0, 3, 8, 10, 6])
HARD_ORDER = np.array([2, 6, 7, 5, 11, 8, 10, 3, 1, 0, 4, 9])


@pytest.mark.parametrize(
    ("chunk", "buffer", "packs"),
    [
        (10_000, 100, [[6, 0, 7], [10, 8, 1], [3, 11], [9, 4], [2, 5]]),
        (6, 2, [[9, 1, 7, 2], [4], [5], [6, 8], [10, 3, 0], [11]]),
        (10_000, 0, [[6], [10, 8], [3, 0, 11], [9, 1, 7], [4, 2], [5]]),
    ],
)
def test_soft_gives_the_packs_of_xtuner(
    tokens: Make, samples: Make, chunk: int, buffer: int, packs: list[list[int]]
) -> None:
    assert samples(soft(tokens(LENGTHS), SOFT_ORDER, 320, chunk, buffer)) == packs


def test_soft_takes_the_shortest_first_even_where_another_would_fit_exactly(tokens: Make, samples: Make) -> None:
    packing = soft(tokens([1, 1, 4, 3, 9, 6]), np.array([0, 1, 2, 3, 4, 5]), 10)
    assert samples(packing) == [[5, 0, 1], [4], [3, 2]]


def plain_soft(lengths: list[int], order: list[int], size: int, chunk: int, buffer: int, most: int) -> list[list[int]]:
    """Pack as XTuner's documentation says, sorting the buffer anew for each pack."""
    packs: list[list[int]] = []
    kept = [sample for sample in order if lengths[sample]]
    for first in range(0, len(kept), chunk):
        pending, pack = kept[first : first + chunk], list[int]()
        while pending:
            sample = pending.pop()
            room = size - sum(lengths[i] for i in pack)
            if lengths[sample] > room or len(pack) == most:
                for other in sorted(pending[-buffer:] if buffer else [], key=lengths.__getitem__):
                    if lengths[other] > room or len(pack) == most:
                        break
                    room -= lengths[other]
                    pack.append(other)
                    pending.remove(other)
                packs.append(pack)
                pack = []
            pack.append(sample)
        packs.append(pack)
    return packs


@given(
    lengths=st.lists(st.integers(0, 12), max_size=60),
    chunk=st.integers(1, 70),
    buffer=st.integers(0, 20),
    most=st.sampled_from([1, 2, 4, 99]),
)
def test_soft_is_a_plain_search_of_the_buffer(
    samples: Make, lengths: list[int], chunk: int, buffer: int, most: int
) -> None:
    order = shuffled(len(lengths), 0, 0)
    packing = soft(np.array(lengths, np.int32), order, 12, chunk, buffer, most)
    assert samples(packing) == plain_soft(lengths, order.tolist(), 12, chunk, buffer, most)


def test_soft_searches_the_greatest_buffer_in_little_time_and_lets_other_threads_run() -> None:
    """A sort of the buffer for each pack would take half an hour here."""
    lengths = np.clip(np.random.default_rng(0).lognormal(6.2, 1.2, 1_000_000), 1, 4096).astype(np.int32)
    order = shuffled(len(lengths), 0, 0)
    soft(lengths[:10], order[:0], 4096)  # compiled before it is timed
    start = time.process_time()
    with ThreadPoolExecutor(1) as pool:
        packing, turns = pool.submit(soft, lengths, order, 4096, len(lengths), 100_000), 0
        while not packing.done():
            time.sleep(0.001)
            turns += 1
    assert time.process_time() - start < 5
    assert turns > 20
    assert packing.result().packs > 200_000


def test_hard_gives_the_stream_of_xtuner_and_keeps_its_tail(tokens: Make, rows: Make) -> None:
    packs = rows(hard(tokens(LENGTHS), HARD_ORDER, 320), LENGTHS)
    indices = [[2, 6, 7], [7, 5, 11], [11, 8, 10], [10, 3, 1, 0, 4], [4, 9]]
    assert [[sample for sample, _, _ in pack] for pack in packs] == indices
    assert [pack[0][1] for pack in packs[:4]] == [0, 4, 90, 147]
    assert [pack[-1][1] + pack[-1][2] for pack in packs[:4]] == [4, 90, 147, 139]
    assert [max(length for _, _, length in pack) for pack in packs[:4]] == [232, 195, 147, 139]
    assert [sum(length for _, _, length in pack) for pack in packs] == [320] * 4 + [132]


def test_internevo_cuts_at_pack_ends_and_keeps_the_tail(tokens: Make, rows: Make) -> None:
    lengths = [4, 7, 8, 5]
    assert rows(internevo(tokens(lengths), np.arange(4), 16, 8), lengths) == [
        [(0, 0, 4), (1, 0, 7), (2, 0, 5)],
        [(2, 5, 3), (3, 0, 5)],
    ]


def test_internevo_cuts_a_stretch_at_seq_len(tokens: Make, rows: Make) -> None:
    one = rows(internevo(tokens([22]), np.arange(1), 16, 8), [22])
    assert one == [[(0, 0, 8), (0, 8, 8)], [(0, 16, 6)]]
    two = rows(internevo(tokens([3, 20]), np.arange(2), 16, 8), [3, 20])
    assert two == [[(0, 0, 3), (1, 0, 8), (1, 8, 5)], [(1, 13, 7)]]


def test_internevo_unpacked_takes_so_many_sentences_a_pack(tokens: Make, samples: Make) -> None:
    assert samples(internevo_unpacked(tokens([4, 7, 8, 8, 8, 2]), np.arange(6), 2)) == [[0, 1], [2, 3], [4, 5]]
    assert samples(internevo_unpacked(tokens([4, 0, 8, 8]), np.arange(4), 2)) == [[0, 2], [3]]
    assert samples(internevo_unpacked(tokens([0]), np.arange(1), 2)) == []


@given(
    lengths=st.lists(st.integers(0, 25), min_size=1, max_size=30).filter(any),
    longest=st.sampled_from([None, 3, 10]),
    most=st.sampled_from([None, 2]),
)
def test_a_cut_sample_goes_on_wherever_its_packs_are_put(
    rows: Make, lengths: list[int], longest: int | None, most: int | None
) -> None:
    packing = hard(np.array(lengths, np.int32), np.arange(len(lengths)), 10, most, longest)
    packs = rows(packing, lengths)
    parts = [part for pack in packs for part in pack]
    assert [(i, t) for i, start, n in parts for t in range(start, start + n)] == [
        (i, t) for i, n in enumerate(lengths) for t in range(n)
    ]
    assert max(n for _, _, n in parts) <= (longest or 10)
    back = np.arange(len(packs))[::-1]
    assert rows(packing.take(np.append(back, -1)), lengths) == [*packs[::-1], []]
    assert rows(joined([packing, packing.head(1).padded(2)], np.array(lengths, np.int32)), lengths) == [
        *packs,
        packs[0],
        [],
    ]
    tokens, cost = costs(packing, np.array(lengths, np.int32), 1, 1)
    assert tokens.tolist() == [sum(n for _, _, n in pack) for pack in packs]
    assert cost.tolist() == [sum(n + n * n for _, _, n in pack) for pack in packs]


def test_none_gives_each_sample_a_pack(tokens: Make, samples: Make) -> None:
    assert samples(none(tokens([3, 0, 8, 5]), np.array([3, 1, 0, 2]))) == [[3], [0], [2]]


@pytest.mark.parametrize(
    "strategy",
    [
        lambda lengths, order, most: hard(lengths, order, 10, most),
        lambda lengths, order, most: internevo(lengths, order, 10, 3, most),
        lambda lengths, order, most: soft(lengths, order, 10, 7, 5, most),
    ],
)
@given(lengths=st.lists(st.integers(0, 9), max_size=40), most=st.integers(1, 5))
def test_no_pack_has_more_than_so_many_segments(strategy: Make, lengths: list[int], most: int) -> None:
    array = np.array(lengths, np.int32)
    packing = strategy(array, np.arange(len(lengths)), most)
    sizes = np.diff(packing.offsets)
    assert ((sizes > 0) & (sizes <= most)).all()
    _, _, length = packing.cuts(array)
    assert length.sum() == sum(lengths)
    assert np.bincount(packing.sample, length, len(lengths)).tolist() == lengths
