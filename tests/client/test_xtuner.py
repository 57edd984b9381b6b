"""Layout xtuner: contexts, shifted labels, cuts over ranks, and collators and contexts of one's own."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packhouse.client.dataset import Options, PackedDataset
from packhouse.client.errors import InvalidRequest
from packhouse.client.plan import PlanFile
from packhouse.client.sequence_context import SequenceContext, split_labels
from packhouse.client.wire_plans import PlanSpec
from packhouse.client.xtuner import build_text_ctx_labels, text_collator
from packhouse.worker.plans import build_plan

Memory = Callable[[], Any]
Write = Callable[..., str]


@dataclass
class Mesh:
    """A mesh of one dimension, as a rank sees it."""

    rank: int
    ranks: int

    def size(self) -> int:
        return self.ranks

    def get_local_rank(self) -> int:
        return self.rank


def item(*ids: int) -> dict[str, Any]:
    return {"input_ids": list(ids), "labels": list(ids), "num_tokens": len(ids)}


@pytest.fixture
def steps(memory_store: Memory, write_dataset: Write) -> Callable[..., list[Any]]:
    def build(samples: list[list[int]], collate_fn: Any = None, **spec: Any) -> list[Any]:
        store = memory_store()
        changes = {"strategy": "internevo", "pack_length": 8, "seed": None, **spec}
        request = PlanSpec(datasets=[write_dataset(store, samples)], **changes)
        plan = PlanFile.open(store, build_plan(store, request).id)
        options = Options(pad_id=9, collate_fn=collate_fn)
        return list(PackedDataset(plan, store, layout="xtuner", options=options))

    return build


def test_a_pack_is_a_context_with_shifted_labels(steps: Callable[..., list[Any]]) -> None:
    ((micro,),) = steps([[11, 12, 13], [21, 22]])
    context = micro["seq_ctx"]
    assert context.input_ids.tolist() == [[11, 12, 13, 21, 22, 9, 9, 9]]
    assert context.cu_seq_lens_q.tolist() == context.cu_seq_lens_k.tolist() == [0, 3, 5, 8]
    assert context.cu_seq_lens_q.dtype == torch.int32
    assert (int(context.max_length_q), int(context.max_length_k), context.num_padding) == (3, 3, 3)
    assert context.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert context.mask.tolist() == [[True] * 5 + [False] * 3]
    assert micro["shifted_labels"].tolist() == [[12, 13, -100, 22, -100, -100, -100, -100]]


def test_a_full_pack_keeps_all_its_tokens_and_a_cut_sample_its_label(steps: Callable[..., list[Any]]) -> None:
    (first,), (second,) = steps([[*range(1, 11)]])
    assert first["seq_ctx"].cu_seq_lens_q.tolist() == [0, 8]
    assert first["seq_ctx"].num_padding == 0
    assert first["shifted_labels"].tolist() == [[2, 3, 4, 5, 6, 7, 8, 9]]
    assert second["shifted_labels"].tolist() == [[10, *[-100] * 7]]


def test_a_long_padding_tail_is_cut_into_segments_of_256() -> None:
    context, labels = build_text_ctx_labels([item(*range(1, 9))], 1000)
    assert context.cu_seq_lens_q.tolist() == [0, 8, 264, 520, 776, 1000]
    assert (int(context.max_length_q), context.num_padding) == (256, 992)
    assert labels.shape == (1, 1000)


def test_no_label_leads_into_the_next_sample() -> None:
    _, labels = build_text_ctx_labels([item(1, 2, 3), item(7, 8, 9)], 8)
    assert labels.tolist() == [[2, 3, -100, 8, 9, -100, -100, -100]]
    context, labels = build_text_ctx_labels([item(5)], 8, pack_to_max_length=False)
    assert (context.input_ids.tolist(), labels.tolist()) == ([[5]], [[-100]])
    with pytest.raises(InvalidRequest, match="a row of 9 tokens does not fit into 8"):
        build_text_ctx_labels([item(*range(9))], 8)


def test_a_collator_of_ones_own_gets_the_nested_list_of_the_batch(steps: Callable[..., list[Any]]) -> None:
    seen: list[Any] = []

    def mine(instances: list[list[Any]], pack_max_length: int, padding_token_idx: int) -> Any:
        seen.append(([[list(one["input_ids"]) for one in micro] for micro in instances], pack_max_length))
        assert all(one["num_tokens"] == len(one["labels"]) for micro in instances for one in micro)
        assert [list(one["labels"]) for one in instances[0][:2]] == [[-100, 12, 13], [-100, 22]]
        return text_collator(instances, pack_max_length, padding_token_idx, pack_to_max_length=False)

    ((first, second),) = steps([[11, 12, 13], [21, 22], [*range(31, 35)]], collate_fn=mine, seq_len=3, micro_batches=2)
    assert seen == [([[[11, 12, 13], [21, 22], [31, 32, 33]], [[34]]], 8)]
    assert first["shifted_labels"].tolist() == [[12, 13, -100, 22, -100, 32, 33, 34]]
    assert first["seq_ctx"].num_padding == second["seq_ctx"].num_padding == 0


class Weighted(SequenceContext):
    """A context of one's own, with one more field."""

    def __init__(self, *, weight: float, **fields: Any) -> None:
        super().__init__(**fields)
        self.weight = weight


def test_a_context_of_ones_own_keeps_its_fields() -> None:
    context, _ = build_text_ctx_labels([item(1, 2, 3)], 5)
    mine = Weighted(**context.data, weight=0.5)
    for made in (mine.split(Mesh(1, 2)), Weighted.cat([mine, mine]), mine.pad(3), mine.to("cpu")):
        assert isinstance(made, Weighted)
        assert made.weight == 0.5


def test_after_cat_padding_is_where_it_was() -> None:
    rows = [build_text_ctx_labels([item(1, 2)], 4)[0], build_text_ctx_labels([item(3, 4, 5)], 4)[0]]
    both = SequenceContext.cat(rows)
    assert both.mask.tolist() == [[True, True, False, False, True, True, True, False]]
    assert both.cu_seq_lens_q.tolist() == [0, 2, 4, 7, 8]
    assert (both.num_padding, int(both.max_length_q)) == (3, 3)
    assert both.position_ids.tolist() == [[0, 1, 0, 1, 0, 1, 2, 0]]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    room=st.integers(0, 600),
    ranks=st.integers(1, 9),
)
def test_the_parts_of_a_split_make_the_row(lengths: list[int], room: int, ranks: int) -> None:
    items = [item(*range(1, n + 1)) for n in lengths]
    context, labels = build_text_ctx_labels(items, sum(lengths) + room)
    parts = [context.split(Mesh(rank, ranks)) for rank in range(ranks)]
    size = context.input_ids.shape[1]
    for name in ("input_ids", "position_ids", "padding"):
        joined = torch.cat([getattr(part, name) for part in parts], 1)
        assert torch.equal(joined[:, :size], getattr(context, name))
    assert joined[:, size:].all()  # what was added is padding
    for part in parts:
        assert part.max_length_q == part.seq_lens_q.max() == part.max_length_k
        assert int(part.cu_seq_lens_q[-1]) == parts[0].input_ids.shape[1] * ranks
        assert part.num_padding == int(part.padding.sum())
        assert (part.seq_lens_q > 0).all()
    cut = torch.cat([split_labels(labels, Mesh(rank, ranks)) for rank in range(ranks)], 1)
    assert torch.equal(cut[:, :size], labels)
    assert (cut[:, size:] == -100).all()
    assert context.num_padding == room  # the row itself is as it was


def test_a_collator_needs_its_layout(memory_store: Memory, write_dataset: Write) -> None:
    store = memory_store()
    plan = PlanFile.open(store, build_plan(store, PlanSpec(datasets=[write_dataset(store, [[1]])], pack_length=8)).id)
    with pytest.raises(InvalidRequest, match="takes no collate_fn"):
        PackedDataset(plan, store, options=Options(collate_fn=partial(text_collator)))
