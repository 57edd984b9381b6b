"""Packs from shards: labels, masks, borders and positions, against a plain reference."""

import io
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhouse.client import kernel as kernels
from packhouse.client.digest import digest_bytes
from packhouse.client.errors import Damaged, InvalidRequest, NotFound
from packhouse.client.format import data_path
from packhouse.client.kernel import KernelName
from packhouse.client.pack import Pack, PackBuilder
from packhouse.client.plan import PlanFile
from packhouse.client.shards import OpenShards, ShardIndex
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.packing.preset import put_preset
from packhouse.worker.plans import build_plan

Write = Callable[..., str]
Memory = Callable[[], Any]


def build(store: Any, datasets: list[str], **spec: Any) -> PlanFile:
    return PlanFile.open(store, build_plan(store, PlanSpec(datasets=datasets, **spec)).id)


def packs(store: Any, plan: PlanFile, open_shards: int = 2, kernel: KernelName = "numba") -> list[Pack]:
    return PackBuilder(plan.header, store, open_shards, kernel=kernel).build(plan.packs, 0, len(plan.packs))


def plain(plan: PlanFile, pack: int, samples: list[list[int]], masks: list[list[int]]) -> list[list[int]]:
    """Build ids, labels, positions and cu_seqlens of a pack token by token."""
    room = plan.spec.pack_length
    ids, labels, positions, ends = [], [], [], [0]
    for i in range(plan.packs.offsets[pack], plan.packs.offsets[pack + 1]):
        sample, start, length = (int(column[i]) for column in plan.packs.arrays()[1:4])
        size = min(len(samples[sample]), room) if plan.spec.overlong == "truncate" else len(samples[sample])
        for position, token in enumerate(range(start, start + length)):
            known = token + 1 < size and masks[sample][token + 1]
            ids.append(samples[sample][token])
            labels.append(samples[sample][token + 1] if known else -100)
            positions.append(position)
        ends.append(len(ids))
    tail = room - len(ids)
    borders = ends + [room] * (tail > 0)
    return [ids + [0] * tail, labels + [-100] * tail, positions + list(range(tail)), borders]


@pytest.mark.parametrize("kernel", ["numba", "numpy"])
@given(
    samples=st.lists(st.lists(st.integers(1, 99), max_size=20), min_size=1, max_size=12).filter(any),
    masked=st.booleans(),
    spec=st.fixed_dictionaries(
        {
            "strategy": st.sampled_from(["best_fit", "internevo"]),
            "pack_length": st.integers(3, 24),
            "ranks": st.integers(1, 3),
            "overlong": st.sampled_from(["truncate", "split"]),
        }
    ),
    data=st.data(),
)
def test_packs_equal_those_of_a_plain_loop(
    memory_store: Memory,
    write_dataset: Write,
    kernel: KernelName,
    samples: list[list[int]],
    masked: bool,
    spec: dict[str, Any],
    data: st.DataObject,
) -> None:
    store = memory_store()
    masks = [[data.draw(st.integers(0, 1)) if masked else 1 for _ in sample] for sample in samples]
    # Two data sets, one without masks, so that shards of both kinds meet in a pack.
    datasets = [write_dataset(store, samples, masks if masked else None), write_dataset(store, [[7, 8, 9]])]
    plan = build(store, datasets, **spec)
    for i, pack in enumerate(packs(store, plan, kernel=kernel)):
        arrays: list[Any] = [pack.input_ids, pack.labels, pack.positions, pack.cu_seqlens]
        assert [array.tolist() for array in arrays] == plain(plan, i, [*samples, [7, 8, 9]], [*masks, [1, 1, 1]])
        assert [array.dtype for array in arrays] == [np.int64, np.int64, np.int64, np.int32]
        assert pack.num_tokens == plan.packs.tokens[i]
        assert pack.max_seqlen == np.diff(pack.cu_seqlens).max()


def test_no_label_crosses_a_document_and_padding_counts_from_zero(memory_store: Memory, write_dataset: Write) -> None:
    store = memory_store()
    plan = build(
        store, [write_dataset(store, [[11, 12, 13], [21, 22]])], pack_length=8, strategy="internevo", seed=None
    )
    (pack,) = packs(store, plan)
    assert pack.input_ids.tolist() == [11, 12, 13, 21, 22, 0, 0, 0]
    assert pack.labels.tolist() == [12, 13, -100, 22, -100, -100, -100, -100]
    assert pack.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert pack.cu_seqlens.tolist() == [0, 3, 5, 8]


def test_empty_samples_and_samples_of_one_token_make_no_empty_segment(
    memory_store: Memory, write_dataset: Write
) -> None:
    store = memory_store()
    plan = build(store, [write_dataset(store, [[1], [], [2], []])], pack_length=2, strategy="internevo", ranks=2)
    full, empty = packs(store, plan)
    assert full.cu_seqlens.tolist() == [0, 1, 2]
    assert full.labels.tolist() == [-100, -100]
    assert (empty.cu_seqlens.tolist(), empty.input_ids.tolist(), empty.num_tokens) == ([0, 2], [0, 0], 0)


def test_a_truncated_sample_has_no_label_at_its_cut_and_a_split_one_has(
    memory_store: Memory, write_dataset: Write
) -> None:
    store = memory_store()
    dataset = write_dataset(store, [[1, 2, 3, 4]])
    cut = packs(store, build(store, [dataset], pack_length=3, overlong="truncate"))
    assert [pack.labels.tolist() for pack in cut] == [[2, 3, -100]]
    split = packs(store, build(store, [dataset], pack_length=3, overlong="split", seed=None))
    assert [pack.labels.tolist() for pack in split] == [[2, 3, 4], [-100, -100, -100]]


def test_a_preset_is_not_cut_whatever_is_asked_for(memory_store: Memory, write_dataset: Write) -> None:
    store = memory_store()
    dataset = write_dataset(store, [[1, 2, 3, 4, 5, 6]])
    arrays = {"boundaries.npy": np.array([0, 1, 2]), "samples.npy": np.array([[0, 0, 0, 0, 0, 3], [0, 0, 0, 0, 3, 6]])}
    files = {"paths.json": b'["mine"]'}
    for name, array in arrays.items():
        np.save(file := io.BytesIO(), array)
        files[name] = file.getvalue()
    preset = put_preset(store, files)
    plan = build(store, [dataset], pack_length=3, strategy="preset", preset=preset, overlong="truncate")
    assert [pack.labels.tolist() for pack in packs(store, plan)] == [[2, 3, 4], [5, 6, -100]]


def test_the_mask_is_that_of_the_label_token_also_across_a_border(memory_store: Memory, write_dataset: Write) -> None:
    store = memory_store()
    dataset = write_dataset(store, [[1, 2, 3, 4, 5, 6]], [[1, 0, 1, 0, 1, 1]])
    plan = build(store, [dataset], pack_length=3, strategy="internevo")
    assert [pack.labels.tolist() for pack in packs(store, plan)] == [[-100, 3, -100], [5, 6, -100]]


def test_ids_over_16_bits_are_kept(memory_store: Memory, write_dataset: Write) -> None:
    store = memory_store()
    plan = build(store, [write_dataset(store, [[99_999, 70_000]], vocab_size=100_000)], pack_length=2)
    assert packs(store, plan)[0].input_ids.tolist() == [99_999, 70_000]


def test_shards_without_rows_hold_no_sample(memory_store: Memory, write_dataset: Write) -> None:
    store = memory_store()
    first = build(store, [write_dataset(store, [[1], [2]], rows_per_shard=2)], pack_length=2).header.datasets[0]
    empty = type(first.shards[0])(**{**first.shards[0].to_json(), "rows": 0})
    index = ShardIndex((type(first)("d", "r", 9, (empty, first.shards[0], empty, first.shards[0])),))
    shards, rows = index.locate(np.arange(4))
    assert (shards.tolist(), rows.tolist()) == ([1, 1, 3, 3], [0, 1, 0, 1])
    with pytest.raises(Damaged, match="takes samples 4 to 4 of 4"):
        index.locate(np.array([4]))


def test_the_shards_used_last_stay_open(memory_store: Memory, write_dataset: Write) -> None:
    store = memory_store()
    plan = build(store, [write_dataset(store, [[1], [2], [3], [4]], rows_per_shard=1)], pack_length=2)
    shards = OpenShards(store, plan.header.datasets[0].shards, limit=2)
    shards.need(np.array([0, 1]))
    first = shards[0]
    shards.need(np.array([0]))
    shards.need(np.array([2]))
    assert (shards[0] is first, len(shards), shards.table[:, 0].astype(bool).tolist()) == (
        True,
        2,
        [True, False, True, False],
    )
    shards.need(np.arange(4))
    assert len(shards) == 4  # what one call needs is never closed, whatever the limit
    store.files.clear()
    shards.need(np.array([3]))
    shards = OpenShards(store, plan.header.datasets[0].shards)
    with pytest.raises(NotFound):
        shards.need(np.array([1]))


def test_a_shard_that_is_opened_again_is_not_read_whole_again(
    memory_store: Memory, write_dataset: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = memory_store()
    plan = build(store, [write_dataset(store, [[1], [2]], rows_per_shard=1)], pack_length=2)
    shards, read = OpenShards(store, plan.header.datasets[0].shards, limit=1), Mock(side_effect=digest_bytes)
    monkeypatch.setattr("packhouse.client.format.digest_bytes", read)
    for number in (0, 1, 0, 1):
        shards.need(np.array([number]))
        assert shards[number].input_ids.tolist() == [number + 1]
    assert read.call_count == 2
    store.files.update({key: data[:-1] for key, data in store.files.items()})
    with pytest.raises(Damaged, match="its manifest says"):
        shards.need(np.array([0]))


@pytest.mark.parametrize("kernel", ["auto", "numba", "numpy"])
def test_the_kernel_that_runs_is_told(memory_store: Memory, write_dataset: Write, kernel: KernelName) -> None:
    store = memory_store()
    plan = build(store, [write_dataset(store, [[1, 2], [3]])], pack_length=2)
    builder = PackBuilder(plan.header, store, kernel=kernel)
    seen = []
    for _ in range(3):
        builder.build(plan.packs, 0, 1)
        seen.append(builder.kernel)
    assert seen == {"auto": ["numpy", "numba", "numba"]}.get(kernel, [kernel] * 3)


def test_without_numba_the_slower_kernel_is_logged_and_the_fast_one_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "packhouse.client.compiled", None)
    assert kernels.load()[0] == "numpy"
    assert "pip install 'packhouse[fast]'" in caplog.text
    with pytest.raises(InvalidRequest, match="kernel 'numba' is not installed"):
        kernels.load("numba")


def test_altered_shards_and_plans_that_ask_for_too_much_are_refused(memory_store: Memory, write_dataset: Write) -> None:
    store = memory_store()
    plan = build(store, [write_dataset(store, [[1, 2], [3]])], pack_length=4, strategy="internevo", seed=None)
    table = plan.packs
    longer = replace(table, length=np.array([2, 2], np.int32), tokens=np.array([4], np.int32))
    names: list[KernelName] = ["numpy", "numba"]
    for kernel in names:
        with pytest.raises(Damaged, match="takes 2 tokens of sample 1, which has 1"):
            PackBuilder(plan.header, store, kernel=kernel).build(longer, 0, 1)
    with pytest.raises(Damaged, match="do not fit its packs"):
        PackBuilder(plan.header, store).build(replace(longer, tokens=table.tokens), 0, 1)
    key = data_path(plan.header.datasets[0].shards[0].key)
    store.files[key] = store.files[key][:-1] + b"\0"
    with pytest.raises(Damaged, match="are not those its manifest states"):
        packs(store, plan)
