"""Packs from shards: labels, masks, borders and positions, against a plain reference."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhouse.client.errors import Damaged, NotFound
from packhouse.client.format import data_path
from packhouse.client.pack import Pack, PackBuilder, ShardCache, ShardIndex
from packhouse.client.plan import PackTable, PlanFile
from packhouse.client.wire import PlanSpec
from packhouse.worker.plans import build_plan

Write = Callable[..., str]
Memory = Callable[[], Any]


def build(store: Any, datasets: list[str], **spec: Any) -> PlanFile:
    return PlanFile.open(store, build_plan(store, PlanSpec(datasets=datasets, **spec)).id)


def packs(store: Any, plan: PlanFile, open_shards: int = 2) -> list[Pack]:
    return PackBuilder(plan.header, store, open_shards).build(plan.packs, 0, len(plan.packs))


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
    for i, pack in enumerate(packs(store, plan)):
        arrays: list[Any] = [pack.input_ids, pack.labels, pack.positions, pack.cu_seqlens]
        assert [array.tolist() for array in arrays] == plain(plan, i, [*samples, [7, 8, 9]], [*masks, [1, 1, 1]])
        assert [array.dtype for array in arrays] == [np.int64, np.int64, np.int64, np.int32]
        assert pack.num_tokens == plan.packs.tokens[i]
        assert (np.diff(pack.cu_seqlens) > 0).all()


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


def test_the_cache_keeps_the_shards_used_last(memory_store: Memory, write_dataset: Write) -> None:
    store = memory_store()
    plan = build(store, [write_dataset(store, [[1], [2], [3]], rows_per_shard=1)], pack_length=2)
    cache = ShardCache(store, plan.header.datasets[0].shards, limit=2)
    first = cache[0]
    assert cache[1] is not first
    assert cache[0] is first
    assert cache[2] is not None
    assert cache[0] is first
    store.files.clear()
    with pytest.raises(NotFound):
        cache[1]


def test_altered_shards_and_plans_that_ask_for_too_much_are_refused(memory_store: Memory, write_dataset: Write) -> None:
    store = memory_store()
    plan = build(store, [write_dataset(store, [[1, 2], [3]])], pack_length=4, strategy="internevo", seed=None)
    table = plan.packs
    longer = PackTable(table.offsets, table.sample, table.start, table.length + np.int32(1), table.tokens, table.cost)
    with pytest.raises(Damaged, match="takes 3 tokens of sample 0, which has 2"):
        PackBuilder(plan.header, store).build(longer, 0, 1)
    key = data_path(plan.header.datasets[0].shards[0].key)
    store.files[key] = store.files[key][:-1] + b"\0"
    with pytest.raises(Damaged, match="are not those its manifest states"):
        packs(store, plan)
