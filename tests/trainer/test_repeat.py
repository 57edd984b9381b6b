"""A plan with fewer steps than are to be trained: refused, stopped at its end, or gone over in new orders."""

import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from packhouse.client.dataset import PackedDataset
from packhouse.client.errors import InvalidRequest
from packhouse.client.plan import PlanFile
from packhouse.client.store import LocalStore
from packhouse.client.wire_plans import PlanSpec
from packhouse.trainer.config import CheckpointSection, DataSection, EvaluationSection, ModelSection, RunConfig
from packhouse.trainer.optim import TrainConfig
from packhouse.trainer.repeat import RepeatedPlan, _order
from packhouse.trainer.run import run
from packhouse.worker.plans import build_plan

Config = Callable[..., RunConfig]


@pytest.fixture
def plan(tmp_path: Path, write_dataset: Callable[..., str]) -> PlanFile:
    """Three steps of two packs."""
    store = LocalStore(tmp_path / "store")
    samples = [[10 * number + place for place in range(8)] for number in range(6)]
    built = build_plan(store, PlanSpec(datasets=[write_dataset(store, samples)], pack_length=8, ranks=2))
    return PlanFile.open(store, built.id)


@pytest.fixture
def config(plan: PlanFile, tmp_path: Path) -> Config:
    """config(steps, at_end, ...) -> settings of a run over the plan, with a checkpoint at every step."""

    def make(steps: int, at_end: Literal["error", "stop", "repeat"], workers: int = 0, **sections: Any) -> RunConfig:
        return RunConfig(
            DataSection(plan.id, store=tmp_path / "store", at_end=at_end, workers=workers),
            TrainConfig(steps, peak_lr=1e-3, schedule="cosine"),
            ModelSection(vocab_size=1000),
            checkpoint=CheckpointSection(tmp_path / "checkpoints", every=1, keep=20),
            **sections,
        )

    return make


def ids(dataset: PackedDataset) -> list[Any]:
    return [data["input_ids"].tolist() for data, _ in dataset]


def test_every_pass_has_each_step_once_and_in_an_order_of_its_own(plan: PlanFile) -> None:
    once = ids(PackedDataset(plan, plan.store))
    many = ids(PackedDataset(RepeatedPlan(plan, 3, 8), plan.store))
    assert many[:3] == once
    assert sorted(many[3:6]) == sorted(once)
    assert many[6:] == [once[step] for step in _order(plan.id, 3, 2)[:2]]
    assert len({tuple(_order("a plan", 50, number).tolist()) for number in range(20)}) == 20
    assert _order(plan.id, 3, 1).tolist() != [0, 1, 2]


def test_the_ranks_of_a_repeated_plan_share_its_steps_and_resume_anywhere(plan: PlanFile) -> None:
    repeated = pickle.loads(pickle.dumps(RepeatedPlan(plan, 3, 8)))
    whole = ids(PackedDataset(repeated, plan.store))
    parts = [ids(PackedDataset(repeated, plan.store, rank, 2)) for rank in range(2)]
    assert [a + b for a, b in zip(*parts, strict=True)] == whole
    for step in range(9):
        resumed = PackedDataset(repeated, plan.store)
        resumed.load_state_dict({"plan": plan.id, "step": step})
        assert ids(resumed) == whole[step:]


@pytest.mark.parametrize("workers", [0, 2])
def test_eight_steps_of_a_plan_that_has_three(config: Config, workers: int) -> None:
    """Steps count on, as they do in the state; a run resumed in the second pass is the unbroken one."""
    expected = run(config(8, "repeat", workers), torch.device("cpu"))
    assert [entry.step for entry in expected] == list(range(8))
    folder = config(8, "repeat").checkpoint.folder  # type: ignore[union-attr]
    states = [(path / "about.json").read_text() for path in sorted(folder.iterdir())]
    assert [re.findall(r'"step": (\d+)', state) for state in states] == [[str(step)] * 2 for step in range(1, 9)]
    for path in sorted(folder.iterdir())[5:]:
        path.rename(path.with_name(f"{path.name}.unfinished"))
    resumed = run(config(8, "repeat", workers), torch.device("cpu"))
    assert [(entry.step, entry.loss) for entry in resumed] == [(entry.step, entry.loss) for entry in expected[5:]]


def test_the_default_refuses_and_names_the_remedies(config: Config) -> None:
    message = (
        r"train.steps is 8 and plan \w+ has 3 steps to train on: lower train.steps, plan with epochs 3 or more, "
        r'or set data.at_end to "stop" or "repeat"'
    )
    with pytest.raises(InvalidRequest, match=message):
        run(config(8, "error"), torch.device("cpu"))


def test_a_run_may_stop_where_the_plan_does(config: Config, tmp_path: Path) -> None:
    """The schedule ends there, too, and the last step is kept."""
    stopped = run(config(8, "stop", evaluation=EvaluationSection(1)), torch.device("cpu"))
    assert [entry.step for entry in stopped] == [0, 1]
    assert (tmp_path / "checkpoints" / "step-000000002").exists()
    exact = replace(config(2, "error"), checkpoint=None, evaluation=EvaluationSection(1))
    assert [(entry.loss, entry.lr) for entry in run(exact, torch.device("cpu"))] == [
        (entry.loss, entry.lr) for entry in stopped
    ]


def test_a_plan_that_is_all_held_out_is_refused(config: Config) -> None:
    for at_end in ("stop", "repeat"):
        with pytest.raises(InvalidRequest, match="has 0 steps to train on, as evaluation holds out 3 of its 3"):
            run(config(8, at_end, evaluation=EvaluationSection(3)), torch.device("cpu"))


def test_held_out_steps_are_in_no_pass(plan: PlanFile) -> None:
    once = ids(PackedDataset(plan, plan.store))
    assert once[2] not in ids(PackedDataset(RepeatedPlan(plan, 2, 8), plan.store))
