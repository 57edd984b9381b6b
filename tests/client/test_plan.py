"""The plan file: what it refuses, and the packs that each rank of any world is given."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhouse.client.errors import Damaged, InvalidRequest, NotFound
from packhouse.client.plan import STEPS_SCHEMA, PlanFile, StepTable, decode_steps, plan_path
from packhouse.client.store import LocalStore
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.plans import build_plan

Write = Callable[..., str]
Memory = Callable[[], Any]
Segments = list[tuple[int, int, int]]


def build(store: Any, write_dataset: Write, lengths: list[int], **spec: Any) -> PlanFile:
    dataset = write_dataset(store, [[1] * n for n in lengths])
    request = PlanSpec(datasets=[dataset], **{"pack_length": 8, **spec})
    return PlanFile.open(store, build_plan(store, request).id)


def segments(table: StepTable, pack: int) -> Segments:
    part = slice(table.packs.offsets[pack], table.packs.offsets[pack + 1])
    columns = table.packs.sample[part], table.packs.start[part], table.packs.length[part]
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.fixture
def plan(memory_store: Memory, write_dataset: Write) -> PlanFile:
    return build(memory_store(), write_dataset, [5, 3, 8, 2, 7, 7, 7, 1, 4], ranks=4)


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=30),
    per_step=st.integers(1, 7),
    world=st.integers(1, 5),
    data=st.data(),
)
def test_the_ranks_packs_end_to_end_are_the_step(
    memory_store: Memory, write_dataset: Write, lengths: list[int], per_step: int, world: int, data: st.DataObject
) -> None:
    plan = build(memory_store(), write_dataset, lengths, ranks=per_step)
    start = data.draw(st.integers(0, plan.steps))
    stop = data.draw(st.integers(start, plan.steps))
    ranks = [decode_steps(plan.slice(start, stop, rank, world)) for rank in range(world)]
    width = -(-per_step // world)
    assert all(table.step.tolist() == np.repeat(range(start, stop), width).tolist() for table in ranks)
    whole = decode_steps(plan.slice(0, plan.steps, 0, 1))
    for step in range(start, stop):
        rows = [(table, (step - start) * width + i) for table in ranks for i in range(width)]
        real = [(table, row) for table, row in rows if table.slot[row] >= 0]
        assert [table.slot[row] for table, row in real] == list(range(per_step))
        expected = [segments(whole, step * per_step + slot) for slot in range(per_step)]
        assert [segments(table, row) for table, row in real] == expected
        assert [table.packs.tokens[row] for table, row in rows if table.slot[row] < 0] == [0] * (
            width * world - per_step
        )


def test_a_slice_survives_an_arrow_stream(plan: PlanFile) -> None:
    batch = plan.slice(0, plan.steps, 1, 3)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, STEPS_SCHEMA) as writer:
        writer.write_batch(batch)
    sent = decode_steps(pa.ipc.open_stream(sink.getvalue()).read_next_batch())
    kept = decode_steps(batch)
    assert sent.step.tolist() == kept.step.tolist()
    assert [segments(sent, i) for i in range(len(sent.packs))] == [segments(kept, i) for i in range(len(kept.packs))]
    part = decode_steps(batch.slice(1))
    assert segments(part, 0) == segments(kept, 1)


def test_another_schema_is_refused(plan: PlanFile) -> None:
    with pytest.raises(Damaged, match="the steps of a plan came as"):
        decode_steps(plan.slice(0, 1, 0, 1).drop_columns(["slot"]))


@pytest.mark.parametrize(
    "part", [(-1, 1, 0, 1), (2, 1, 0, 1), (0, 99, 0, 1), (0, 1, 2, 2), (0, 1, -1, 2), (0, 1, 0, 0)]
)
def test_steps_and_ranks_that_are_not_there_are_refused(plan: PlanFile, part: tuple[int, int, int, int]) -> None:
    with pytest.raises(InvalidRequest, match=r"are not in plan|is not in a world"):
        plan.slice(*part)


@given(data=st.data())
def test_any_altered_or_cut_plan_is_refused(memory_store: Memory, write_dataset: Write, data: st.DataObject) -> None:
    store = memory_store()
    plan = build(store, write_dataset, [5, 3, 8, 2])
    whole = store.files[plan_path(plan.id)]
    at = data.draw(st.integers(0, len(whole) - 1))
    altered = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    for damaged in (altered, whole[:at]):
        store.files[plan_path(plan.id)] = damaged
        try:
            again = PlanFile.open(store, plan.id)
        except Damaged:
            continue
        # Padding between the buffers, and what Arrow writes twice, may differ; what is read may not.
        assert again.header == plan.header
        assert all((a == b).all() for a, b in zip(again.packs.arrays(), plan.packs.arrays(), strict=True))


def test_another_plans_file_is_refused(memory_store: Memory, write_dataset: Write) -> None:
    store = memory_store()
    one, two = (build(store, write_dataset, [5, 3], pack_length=length) for length in (8, 9))
    store.files[plan_path(one.id)] = store.files[plan_path(two.id)]
    with pytest.raises(Damaged, match=f"the file of plan {one.id} holds plan {two.id}"):
        PlanFile.open(store, one.id)
    with pytest.raises(NotFound):
        PlanFile.open(store, "0" * 32)


def test_a_mapped_plan_can_be_sent_to_another_process(tmp_path: Path, write_dataset: Write) -> None:
    plan = build(LocalStore(tmp_path), write_dataset, [5, 3, 8, 2])
    sent = pickle.loads(pickle.dumps(plan))
    assert sent.header == plan.header
    assert (sent.steps, sent.packs_per_step, sent.spec, sent.report) == (3, 1, plan.spec, plan.report)
    assert sent.packs.sample.tolist() == plan.packs.sample.tolist()
