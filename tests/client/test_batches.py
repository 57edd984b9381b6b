"""Loader: workers of every kind give the same steps; the state is what was delivered; errors and waits say what for."""

import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from packhouse.client import loader
from packhouse.client.dataset import Options, PackedDataset
from packhouse.client.errors import Damaged, InvalidRequest, Mismatch, PackhouseError, Unavailable
from packhouse.client.format import data_path
from packhouse.client.plan import PlanFile
from packhouse.client.store import LocalStore
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.plans import build_plan

Write = Callable[..., str]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory, write_dataset: Write) -> PlanFile:
    return make_plan(LocalStore(tmp_path_factory.mktemp("store")), write_dataset)


def make_plan(store: LocalStore, write_dataset: Write) -> PlanFile:
    dataset = write_dataset(store, [[100 + i] * (1 + i * 7 % 13) for i in range(60)], rows_per_shard=20)
    spec = PlanSpec(datasets=[dataset], pack_length=16, ranks=2, seed=3)
    return PlanFile.open(store, build_plan(store, spec).id)


def listed(batches: Any) -> list[Any]:
    """Return the steps in comparable form."""
    return [[data["step"], data["input_ids"].tolist(), labels.tolist()] for data, labels in batches]


@pytest.mark.parametrize(("workers", "method"), [(0, None), (1, "fork"), (4, "fork"), (2, "spawn")])
def test_workers_of_every_kind_give_the_same_steps(plan: PlanFile, workers: int, method: Any) -> None:
    dataset = PackedDataset(plan, plan.store, start_step=2)
    batches = loader(dataset, workers=workers, method=method)
    assert len(batches) == plan.steps - 2
    alone = listed(dataset)
    assert listed(batches) == listed(batches) == alone  # the second time by the same workers


@pytest.mark.parametrize("layout", ["internevo_unpacked", "xtuner", "padded"])
def test_every_layout_goes_through_workers(plan: PlanFile, write_dataset: Write, layout: Any) -> None:
    spec = plan.spec.model_copy(update={"strategy": "internevo_unpacked", "seq_len": 8})
    plan = PlanFile.open(plan.store, build_plan(plan.store, spec).id)  # type: ignore[arg-type]
    dataset = PackedDataset(plan, plan.store, layout=layout)
    assert sum(1 for _ in loader(dataset, workers=2)) == plan.steps


@pytest.mark.parametrize("workers", [0, 3])
def test_the_state_is_what_was_delivered(plan: PlanFile, workers: int) -> None:
    dataset = PackedDataset(plan, plan.store)
    whole = listed(dataset)
    batches = loader(dataset, workers=workers)
    assert batches.state_dict() == {"plan": plan.id, "step": 0}
    for step, batch in enumerate(batches):
        assert batches.state_dict() == {"plan": plan.id, "step": step + 1}
        if step == 3:
            state = batches.state_dict()
        assert listed([batch]) == [whole[step]]
    resumed = loader(PackedDataset(plan, plan.store), workers=(workers + 1) % 4)
    resumed.load_state_dict(state)
    assert len(resumed) == plan.steps - 4
    assert listed(resumed) == whole[4:]
    assert listed(resumed) == whole  # later loops are whole again
    resumed.load_state_dict({"plan": plan.id, "step": plan.steps})
    assert listed(resumed) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_was_left_leaves_nothing_behind(plan: PlanFile, workers: int) -> None:
    dataset = PackedDataset(plan, plan.store)
    whole, batches = listed(dataset), loader(dataset, workers=workers)
    for stop in (1, 3):
        iterator = iter(batches)
        assert listed(next(iterator) for _ in range(stop)) == whole[:stop]
    assert listed(batches) == whole


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("at", [0, 1, 4, 7])
def test_torchdatas_stateful_loader_resumes(plan: PlanFile, workers: int, at: int) -> None:
    def make() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(PackedDataset(plan, plan.store), batch_size=None, num_workers=workers)

    whole = listed(PackedDataset(plan, plan.store))
    first = make()
    iterator = iter(first)
    assert listed(next(iterator) for _ in range(at)) == whole[:at]
    state = first.state_dict()
    resumed = make()
    resumed.load_state_dict(state)
    assert listed(resumed) == whole[at:]


def test_a_workers_state_is_good_for_it_alone(plan: PlanFile) -> None:
    state = {"plan": plan.id, "step": 3, "worker": [1, 2]}
    with pytest.raises(Mismatch, match="that of worker 1 of 2 alone"):
        PackedDataset(plan, plan.store).load_state_dict(state)
    with pytest.raises(InvalidRequest, match="of one worker"):
        loader(PackedDataset(plan, plan.store)).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_worker_names_shard_and_step(tmp_path: Path, write_dataset: Write, workers: int) -> None:
    plan = make_plan(LocalStore(tmp_path), write_dataset)
    receipt = plan.header.datasets[0].shards[2]
    path = tmp_path / data_path(receipt.key)
    path.write_bytes(path.read_bytes()[:-1])
    seen: list[Any] = []
    with pytest.raises(Damaged, match=rf"step \d+ of plan {plan.id}: {data_path(receipt.key)} has") as caught:
        seen.extend(loader(PackedDataset(plan, plan.store), workers=workers))
    assert f"step {len(seen)} of" in str(caught.value)


def fails(packs: Any, step: int) -> Any:
    raise ZeroDivisionError("mine")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_layout_keeps_its_kind_and_names_the_step(plan: PlanFile, workers: int) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        list(loader(PackedDataset(plan, plan.store, layout=fails), workers=workers))
    told = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert f"while step 0 of plan {plan.id} was built" in told


def is_late(packs: Any, step: int) -> Any:
    raise RuntimeError("mine timed out")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_layouts_own_error_is_not_taken_for_a_worker_that_is_late(plan: PlanFile, workers: int) -> None:
    with pytest.raises(RuntimeError, match="mine timed out"):
        list(loader(PackedDataset(plan, plan.store, layout=is_late), workers=workers))


def dies(packs: Any, step: int) -> Any:
    if step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return step


def hangs(packs: Any, step: int) -> Any:
    if step == 2:
        time.sleep(3600)
    return step


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_died_is_told_as_that(plan: PlanFile, workers: int) -> None:
    seen: list[int] = []
    with pytest.raises(Unavailable, match=r"a loader worker died before step \d of"):
        seen.extend(loader(PackedDataset(plan, plan.store, layout=dies), workers=workers, timeout=60))
    assert seen == [*range(len(seen))]
    assert len(seen) <= 3


def test_a_worker_that_hangs_is_told_with_its_step(plan: PlanFile) -> None:
    batches = loader(PackedDataset(plan, plan.store, layout=hangs), workers=1, timeout=1)
    seen: list[int] = []
    with pytest.raises(Unavailable, match=r"step 2 of .* did not come from loader worker 0 of 1 within 1 s"):
        seen.extend(batches)
    assert seen == [0, 1]


class SlowToStart:
    """A layout that a worker takes its time to receive, or does not live to."""

    def __init__(self, dies: bool) -> None:
        self.dies = dies

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["dies"]:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)

    def __call__(self, packs: Any, step: int) -> int:
        return step


def test_the_time_for_a_step_begins_when_its_worker_has_started(plan: PlanFile) -> None:
    dataset = PackedDataset(plan, plan.store, layout=SlowToStart(False), options=Options(kernel="numpy"))
    assert [*loader(dataset, workers=1, method="spawn", timeout=1)] == [*range(plan.steps)]


def test_a_death_at_the_start_is_told_as_that(plan: PlanFile) -> None:
    dataset = PackedDataset(plan, plan.store, layout=SlowToStart(True))
    with pytest.raises(Unavailable, match="a loader worker died before step 0 of"):
        next(iter(loader(dataset, workers=1, method="spawn", timeout=0.5)))


def test_a_worker_that_never_starts_is_told(plan: PlanFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packhouse.client.batches.START", 0.1)
    dataset = PackedDataset(plan, plan.store, layout=SlowToStart(False))
    with pytest.raises(Unavailable, match=r"loader worker 0 of 1, which step 0 of plan .* did not start within 0 s"):
        next(iter(loader(dataset, workers=1, method="spawn", timeout=0.1)))


def steady(batches: Any) -> list[int]:
    """Return what waits once that has not changed for a while."""
    before: list[int] = []
    now: list[int]
    while (now := batches.waiting()) != before:
        before = now
        time.sleep(0.15)
    return now


def rising(packs: Any, step: int) -> Any:
    return torch.zeros(100 * step)


@pytest.mark.parametrize("layout", ["internevo", "internevo_unpacked", "xtuner", "padded", rising])
def test_what_waits_is_bounded_in_the_bytes_that_the_layout_makes(
    plan: PlanFile, write_dataset: Write, layout: Any
) -> None:
    changes = {"strategy": "internevo_unpacked", "seq_len": 16, "pack_length": 64, "epochs": 12}
    spec = plan.spec.model_copy(update=changes)
    plan = PlanFile.open(plan.store, build_plan(plan.store, spec).id)  # type: ignore[arg-type]
    batches = loader(PackedDataset(plan, plan.store, layout=layout), workers=2, method="fork", prefetch_bytes=100_000)
    share, largest = 50_000, 0
    for step, _ in enumerate(batches):
        if step in (2, 40):
            largest = max(largest, *steady(batches))
            assert all(share / 3 < size <= share for size in batches.waiting()), batches.waiting()
    assert step == plan.steps - 1
    assert batches.waiting() == [0, 0]


def test_prefetch_that_holds_no_step_is_refused(plan: PlanFile) -> None:
    dataset = PackedDataset(plan, plan.store)
    with pytest.raises(InvalidRequest, match="does not hold a step of 768 bytes for each of 3"):
        loader(dataset, workers=3, prefetch_bytes=3 * 768 - 1)
    assert listed(loader(dataset, workers=3, prefetch_bytes=3 * 768)) == listed(dataset)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_that_wait_for_room_keep_nobody_waiting(plan: PlanFile, workers: int) -> None:
    dataset = PackedDataset(plan, plan.store)
    batches = loader(dataset, workers=workers, prefetch_bytes=1 << 12)
    whole = listed(dataset)
    begun = time.monotonic()
    for stop in (1, 3, 2):
        iterator = iter(batches)
        assert listed(next(iterator) for _ in range(stop)) == whole[:stop]
    time.sleep(0.2)  # the workers have made what there is room for
    del iterator, batches
    gc.collect()
    assert time.monotonic() - begun < 4  # torch waits five seconds for a worker that does not end


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.parametrize("layout", ["internevo", "xtuner"])
def test_pinning_leaves_the_batches_as_they_are(plan: PlanFile, layout: Any) -> None:
    dataset = PackedDataset(plan, plan.store, layout=layout)
    assert len(list(loader(dataset, workers=1, pin_memory=True))) == plan.steps


def test_what_belongs_to_the_trainer_is_checked(plan: PlanFile) -> None:
    with pytest.raises(Mismatch, match=r"made with tokenizer t{32}, the trainer's is other"):
        PackedDataset(plan, plan.store, options=Options(tokenizer="other"))
    with pytest.raises(Mismatch, match="has ids up to 999, and the model knows 999"):
        PackedDataset(plan, plan.store, options=Options(vocab_size=999))
    PackedDataset(plan, plan.store, options=Options(tokenizer="t" * 32, vocab_size=1000))
    assert issubclass(Mismatch, PackhouseError)
