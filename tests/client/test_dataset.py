"""PackedDataset: any world, any loader, resumed anywhere, gives the steps of the plan once and in order."""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from packhouse.client.dataset import PackedDataset
from packhouse.client.errors import InvalidRequest, Mismatch
from packhouse.client.plan import PlanFile
from packhouse.client.store import LocalStore
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.plans import build_plan

Write = Callable[..., str]
Memory = Callable[[], Any]
Row = tuple[list[int], list[int], list[int]]

DOCUMENTS = [[100 + i] * (1 + i * 7 % 13) for i in range(40)]


def build(store: Any, write_dataset: Write, documents: list[list[int]] = DOCUMENTS, **spec: Any) -> PlanFile:
    datasets = [write_dataset(store, documents), write_dataset(store, [[5, 6, 7], [8]], [[0, 1, 1], [1]])]
    request = PlanSpec(datasets=datasets, **{"pack_length": 16, "ranks": 3, "epochs": 2, **spec})
    return PlanFile.open(store, build_plan(store, request).id)


def rows(batch: list[Any]) -> Iterator[Row]:
    """Yield the packs of a batch, without those that are all padding."""
    data, labels = batch
    for ids, ends, target in zip(data["input_ids"], data["cu_seqlens"], labels, strict=True):
        if ids.any():
            yield ids.tolist(), ends.tolist(), target.tolist()


def steps(plan: PlanFile, world: int, start: int = 0) -> list[list[Row]]:
    """Return the steps as ``world`` ranks see them, one rank's packs after the other's."""
    ranks = [PackedDataset(plan, plan.store, rank, world, start_step=start) for rank in range(world)]
    return [[row for batch in batches for row in rows(batch)] for batches in zip(*ranks, strict=True)]


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=30),
    spec=st.fixed_dictionaries(
        {
            "strategy": st.sampled_from(["best_fit", "internevo"]),
            "ranks": st.integers(1, 5),
            "micro_batches": st.integers(1, 2),
            "overlong": st.sampled_from(["truncate", "split", "drop"]),
        }
    ),
    worlds=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    data=st.data(),
)
def test_a_change_of_world_at_any_step_changes_no_step(
    memory_store: Memory,
    write_dataset: Write,
    lengths: list[int],
    spec: dict[str, Any],
    worlds: tuple[int, int],
    data: st.DataObject,
) -> None:
    documents = [[100 + i] * n for i, n in enumerate(lengths)]
    plan = build(memory_store(), write_dataset, documents, **spec)
    whole = steps(plan, 1)
    tokens = sum(sum(token > 0 for token in ids) for step in whole for ids, _, _ in step)
    assert (len(whole), tokens) == (plan.steps, plan.report.tokens)
    at = data.draw(st.integers(0, plan.steps))
    assert steps(plan, worlds[0])[:at] + steps(plan, worlds[1], at) == whole


def test_every_step_can_be_resumed_from_its_state(memory_store: Memory, write_dataset: Write) -> None:
    plan = build(memory_store(), write_dataset)
    whole = [list(rows(batch)) for batch in PackedDataset(plan, plan.store)]
    dataset = PackedDataset(plan, plan.store)
    assert dataset.state_dict() == {"plan": plan.id, "step": 0}
    for step, batch in enumerate(dataset):
        assert batch[0]["step"] == step
        state = dataset.state_dict()
        assert state == {"plan": plan.id, "step": step + 1}
        resumed = PackedDataset(plan, plan.store)
        resumed.load_state_dict(state)
        assert len(resumed) == plan.steps - step - 1
        assert [list(rows(batch)) for batch in resumed] == whole[step + 1 :]


@pytest.mark.parametrize(("workers", "method"), [(0, None), (1, "fork"), (3, "fork")])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:This DataLoader will create:UserWarning")
def test_loader_workers_give_each_step_once_and_in_order(
    tmp_path: Path, write_dataset: Write, workers: int, method: str | None
) -> None:
    plan = build(LocalStore(tmp_path), write_dataset)
    alone = list(PackedDataset(plan, plan.store, 1, 2, start_step=1))
    dataset = PackedDataset(plan, plan.store, 1, 2, start_step=1)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=method)
    batches = list(loader)
    assert len(batches) == len(loader) == len(dataset) == plan.steps - 1
    for (data, labels), (expected, target) in zip(batches, alone, strict=True):
        assert data["step"] == expected["step"]
        assert torch.equal(data["input_ids"], expected["input_ids"])
        assert torch.equal(data["indexes"], expected["indexes"])
        assert [ends.tolist() for ends in data["cu_seqlens"]] == [ends.tolist() for ends in expected["cu_seqlens"]]
        assert torch.equal(labels, target)


def test_all_ranks_have_equally_many_packs_where_the_world_does_not_divide_a_step(
    memory_store: Memory, write_dataset: Write
) -> None:
    plan = build(memory_store(), write_dataset, ranks=5)
    ranks = [list(PackedDataset(plan, plan.store, rank, 3)) for rank in range(3)]
    for batches in ranks:
        assert len(batches) == plan.steps
        assert all(data["input_ids"].shape == (2, 16) for data, _ in batches)
    data, labels = ranks[0][0]
    assert (data["input_ids"][1].any(), data["cu_seqlens"][1].tolist(), labels[1].max()) == (False, [0, 16], -100)


def test_a_second_pass_repeats_the_first(memory_store: Memory, write_dataset: Write) -> None:
    plan = build(memory_store(), write_dataset)
    dataset = pickle.loads(pickle.dumps(PackedDataset(plan, plan.store, start_step=2)))
    first = [list(rows(batch)) for batch in dataset]
    assert [list(rows(batch)) for batch in dataset] == first


def test_a_state_of_another_plan_is_refused(memory_store: Memory, write_dataset: Write) -> None:
    store = memory_store()
    ours, theirs = (build(store, write_dataset, pack_length=length) for length in (16, 17))
    dataset = PackedDataset(ours, store)
    with pytest.raises(Mismatch, match=f"belongs to plan {theirs.id} and this data set reads plan {ours.id}"):
        dataset.load_state_dict(PackedDataset(theirs, store).state_dict())
    with pytest.raises(InvalidRequest, match=f"steps {ours.steps + 1} to"):
        dataset.load_state_dict({"plan": ours.id, "step": ours.steps + 1})
    for step in (1.5, "1", None):
        with pytest.raises(Mismatch, match="is not a state of a data set"):
            dataset.load_state_dict({"plan": ours.id, "step": step})


@pytest.mark.parametrize("arguments", [{"rank": 1}, {"rank": -1}, {"layout": "flat"}, {"start_step": 10_000}])
def test_what_is_not_there_is_refused(memory_store: Memory, write_dataset: Write, arguments: dict[str, Any]) -> None:
    plan = build(memory_store(), write_dataset)
    with pytest.raises(InvalidRequest):
        PackedDataset(plan, plan.store, **arguments)


def test_epochs_differ_in_order_and_not_in_content(memory_store: Memory, write_dataset: Write) -> None:
    """Epochs are in the plan, so that they reach workers that stay, and a resumed run, without being told."""
    samples = [[100 + i] * 4 for i in range(24)]
    plan = build(memory_store(), write_dataset, samples, ranks=1, epochs=2, strategy="none", pack_length=4)
    seen = [int(data["input_ids"][0, 0]) for data, _ in PackedDataset(plan, plan.store)]
    first, second = seen[:26], seen[26:]
    assert sorted(first) == sorted(second)
    assert first != second


def test_a_shard_may_be_written_again_while_it_is_read(tmp_path: Path, write_dataset: Write) -> None:
    plan = build(LocalStore(tmp_path), write_dataset)
    expected = [list(rows(batch)) for batch in PackedDataset(plan, plan.store)]
    reader = iter(PackedDataset(plan, plan.store))
    seen = [list(rows(next(reader)))]
    for path in tmp_path.rglob("shards/*/*.arrow"):
        key = path.relative_to(tmp_path).as_posix()
        plan.store.write(key, path.read_bytes())  # type: ignore[attr-defined]
    assert seen + [list(rows(batch)) for batch in reader] == expected


def test_documents_of_one_token_make_segments_of_one(memory_store: Memory, write_dataset: Write) -> None:
    plan = build(memory_store(), write_dataset, [[11], [], [21], []], ranks=1, epochs=1, seed=None, pack_length=4)
    for data, _ in PackedDataset(plan, plan.store):
        (ends,) = data["cu_seqlens"]
        assert (ends.dtype, int(ends[0]), int(ends[-1])) == (torch.int32, 0, data["input_ids"].shape[1])
        assert (ends.diff() >= 1).all()
