"""The difference of two plans: requests, figures, packs in common, the first step that differs."""

from collections.abc import Callable
from typing import Any

import pytest

from packhouse.client.plan import PlanFile
from packhouse.client.plan_diff import plan_diff
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.plans import build_plan

Make = Callable[..., Any]


@pytest.fixture
def build(memory_store: Make, write_dataset: Make) -> Make:
    store = memory_store()
    dataset = write_dataset(store, [[1] * n for n in (5, 3, 8, 2, 7, 7, 7, 1, 4, 8)])

    def built(**fields: Any) -> PlanFile:
        spec = PlanSpec(**{"datasets": [dataset], "pack_length": 8, "ranks": 2, **fields})
        return PlanFile.open(store, build_plan(store, spec).id)

    return built


def test_a_plan_does_not_differ_from_itself(build: Make) -> None:
    same = plan_diff(build(), build())
    assert (same.spec, same.figures, same.first_step) == ({}, {}, None)
    assert same.packs_in_common == same.packs[0] == same.packs[1]
    assert same.steps_in_common == build().steps


def test_an_added_epoch_keeps_the_steps_of_the_first(build: Make) -> None:
    more = plan_diff(build(strategy="none"), build(strategy="none", epochs=2))
    assert more.spec == {"epochs": (1, 2)}
    assert (more.steps_in_common, more.first_step) == (5, 5)
    assert more.figures["packs"] == (10, 20)


def test_another_seed_keeps_packs_that_happen_to_be_the_same(build: Make) -> None:
    one, two = build(strategy="none"), build(strategy="none", seed=1)
    other = plan_diff(one, two)
    assert other.spec == {"seed": (0, 1)}
    assert other.packs_in_common == 10
    assert other.steps_in_common < 5


def test_another_dataset_has_no_pack_in_common(build: Make, memory_store: Make, write_dataset: Make) -> None:
    store = memory_store()
    spec = PlanSpec(datasets=[write_dataset(store, [[2] * 5])], pack_length=8)
    other = plan_diff(build(), PlanFile.open(store, build_plan(store, spec).id))
    assert (other.packs_in_common, other.steps_in_common, other.first_step) == (0, 0, 0)
    assert "datasets" in other.spec
