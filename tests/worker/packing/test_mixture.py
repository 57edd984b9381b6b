"""Mixtures: how often samples are drawn, and how evenly the datasets are spread."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhouse.client.errors import InvalidRequest
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.packing.mixture import draws, interleaved


def spec(**fields: Any) -> PlanSpec:
    return PlanSpec(datasets=["a", "b"], pack_length=8, **fields)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any))
def test_each_source_has_its_share_of_any_run_to_within_two(counts: list[int]) -> None:
    places = interleaved(counts)
    total = sum(counts)
    for source, count in enumerate(counts):
        taken = np.concatenate([[0], np.cumsum(places == source)])
        assert taken[-1] == count
        ahead = taken * total - np.arange(total + 1) * count
        assert abs(ahead).max() < total  # within one at each place, so any run to within two
        assert ahead.max() - ahead.min() < 2 * total


def test_weights_are_shares_of_tokens() -> None:
    lengths = np.array([4, 4, 4, 4, 2, 2], np.int32)
    one, two = draws(spec(weights=[1, 3]), lengths, [0, 4, 6])
    # 20 tokens in all: 5 of the first, which has 16, and 15 of the second, which has 4.
    assert (one.passes, one.extra) == (0, 1)
    assert (two.passes, two.extra) == (4, 0)
    again = draws(spec(weights=[0.25, 0.75], epochs=4), lengths, [0, 4, 6])
    assert [(draw.passes, draw.extra) for draw in again] == [(1, 1), (15, 0)]


def test_epochs_are_passes_of_each() -> None:
    one, two = draws(spec(dataset_epochs=[1.5, 2]), np.ones(10, np.int32), [0, 4, 10])
    assert (one.first, one.last, one.passes, one.extra) == (0, 4, 1, 2)
    assert (two.first, two.last, two.passes, two.extra) == (4, 10, 2, 0)
    (both,) = draws(spec(epochs=3), np.ones(10, np.int32), [0, 4, 10])
    assert (both.first, both.last, both.passes, both.extra, both.key) == (0, 10, 3, 0, ())


@pytest.mark.parametrize(
    ("fields", "lengths", "message"),
    [
        ({"weights": [0, 1]}, [1, 1], "dataset a has 0 in weights"),
        ({"dataset_epochs": [1, 0]}, [1, 1], "dataset b has 0 in dataset_epochs"),
        ({"weights": [1, 1]}, [1, 0], "dataset b has no tokens"),
        ({"weights": [1, 1e-9]}, [1, 1], "dataset b has 1 samples, and its part of weights draws none"),
    ],
)
def test_weights_that_draw_nothing_are_refused(fields: dict[str, Any], lengths: list[int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        draws(spec(**fields), np.array(lengths, np.int32), [0, 1, 2])
    assert caught.value.remedy
