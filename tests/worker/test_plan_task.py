"""Where plans are built: the same plan here and on a worker, and a worker that dies is told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packhouse.client.errors import InvalidRequest, Unavailable
from packhouse.client.store import LocalStore
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.executor import Executor, WorkerDied
from packhouse.worker.plan_task import build_where_it_fits

Make = Callable[..., Any]


@pytest.fixture
def spec(tmp_path: Path, write_dataset: Make) -> PlanSpec:
    return PlanSpec(datasets=[write_dataset(LocalStore(tmp_path), [[1] * n for n in (3, 9, 4)])], pack_length=8)


def test_a_plan_is_the_same_wherever_it_is_built(tmp_path: Path, spec: PlanSpec, executor: Executor) -> None:
    store = LocalStore(tmp_path)
    here = build_where_it_fits(executor, store, spec, write=False)
    there = build_where_it_fits(executor, store, spec, write=False, small=0)
    assert here == there
    assert not list(store.list("packs"))


def test_weights_count_towards_what_is_built_here(tmp_path: Path, spec: PlanSpec, executor: Executor) -> None:
    store = LocalStore(tmp_path)
    tasks = []

    class Counting(Executor):
        def submit(self, *arguments: Any, **options: Any) -> Any:
            tasks.append(executor.submit(*arguments, **options))
            return tasks[-1]

        wait, result = executor.wait, executor.result

    for times, submitted in ((1, 0), (2, 1)):
        asked = spec.model_copy(update={"dataset_epochs": [times]})
        built = build_where_it_fits(Counting(), store, asked, write=False, small=3)
        assert (built.report.samples, len(tasks)) == (3 * times, submitted)


def test_what_a_worker_refuses_comes_back(tmp_path: Path, spec: PlanSpec, executor: Executor) -> None:
    impossible = spec.model_copy(update={"overlong": "error"})
    with pytest.raises(InvalidRequest, match=r"shorter than sample 1 \(9 tokens\)"):
        build_where_it_fits(executor, LocalStore(tmp_path), impossible, write=True, small=0)


def test_a_worker_that_dies_is_told(tmp_path: Path, spec: PlanSpec) -> None:
    class Dying(Executor):
        def submit(self, *_: Any, **__: Any) -> str:
            return "task"

        def wait(self, tasks: Any, timeout: float) -> list[Any]:
            return list(tasks)

        def result(self, task: Any) -> Any:
            raise WorkerDied("killed")

    with pytest.raises(Unavailable, match="the worker that built the plan died"):
        build_where_it_fits(Dying(), LocalStore(tmp_path), spec, write=True, small=0)
