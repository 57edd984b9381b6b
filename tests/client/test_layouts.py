"""Layouts internevo and internevo_unpacked: the worked examples of InternEvo's documentation, end to end."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from packhouse.client.dataset import PackedDataset
from packhouse.client.errors import InvalidRequest
from packhouse.client.layouts import (
    load_batch,
    load_micro_batch,
    packed_data_normalizer,
    split_data_sequence_parallel,
    unpack_data,
)
from packhouse.client.pack import Pack
from packhouse.client.plan import PlanFile
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.plans import build_plan

SENTENCES = [
    [2323, 442, 252, 341],
    [233, 3442, 322, 31, 2514, 49731, 51],
    [4326, 427, 465, 22, 314, 9725, 346, 1343],
    [24, 2562, 5, 25, 356],
]
# fmt: off
INPUT_IDS = [
    [2323, 442, 252, 341, 233, 3442, 322, 31, 2514, 49731, 51, 4326, 427, 465, 22, 314],
    [9725, 346, 1343, 24, 2562, 5, 25, 356, 0, 0, 0, 0, 0, 0, 0, 0],
]
LABELS = [
    [442, 252, 341, -100, 3442, 322, 31, 2514, 49731, 51, -100, 427, 465, 22, 314, 9725],
    [346, 1343, -100, 2562, 5, 25, 356, -100, -100, -100, -100, -100, -100, -100, -100, -100],
]
INDEXES = [
    [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4],
    [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7],
]
# fmt: on
CU_SEQLENS = [[0, 4, 11, 16], [0, 3, 8, 16]]

Batches = Callable[..., list[Any]]


@pytest.fixture
def batches(memory_store: Callable[[], Any], write_dataset: Callable[..., str]) -> Batches:
    def build(samples: list[list[int]], layout: Any = "internevo", **spec: Any) -> list[Any]:
        store = memory_store()
        dataset = write_dataset(store, samples, vocab_size=50_000)
        changes = {"strategy": "internevo", "seq_len": 8, "pack_length": 16, "seed": None, **spec}
        request = PlanSpec(datasets=[dataset], **changes)
        return list(PackedDataset(PlanFile.open(store, build_plan(store, request).id), store, layout=layout))

    return build


def test_four_sentences_make_the_documented_batch(batches: Batches) -> None:
    ((data, labels),) = batches(SENTENCES, micro_batches=2)
    assert data["input_ids"].tolist() == INPUT_IDS
    assert labels.tolist() == LABELS
    assert data["indexes"].tolist() == INDEXES
    assert [ends.tolist() for ends in data["cu_seqlens"]] == CU_SEQLENS
    assert data["input_ids"].shape == data["indexes"].shape == labels.shape == (2, 16)
    assert data["input_ids"].dtype == data["indexes"].dtype == labels.dtype == torch.int64
    assert all(ends.dtype == torch.int32 for ends in data["cu_seqlens"])
    assert data["step"] == 0


def test_without_micro_batches_each_pack_is_a_step(batches: Batches) -> None:
    steps = batches(SENTENCES)
    assert [data["input_ids"].tolist() for data, _ in steps] == [[row] for row in INPUT_IDS]
    assert [labels.tolist() for _, labels in steps] == [[row] for row in LABELS]
    assert [data["step"] for data, _ in steps] == [0, 1]


@pytest.mark.parametrize(("offset", "max_seqlen"), [(0, 7), (1, 8)])
def test_a_micro_batch_is_normalized_as_documented(batches: Batches, offset: int, max_seqlen: int) -> None:
    (batch,) = batches(SENTENCES, micro_batches=2)
    data, labels = load_micro_batch(batch, offset)
    assert data["input_ids"].tolist() == [INPUT_IDS[offset]]
    assert data["indexes"].tolist() == [INDEXES[offset]]
    assert [ends.tolist() for ends in data["cu_seqlens"]] == [CU_SEQLENS[offset]]
    normal, same = packed_data_normalizer(data, labels)
    assert normal["input_ids"].tolist() == [INPUT_IDS[offset]]
    assert normal["indexes"].tolist() == INDEXES[offset]
    assert normal["cu_seqlens"].tolist() == CU_SEQLENS[offset]
    assert type(normal["max_seqlen"]) is int
    assert normal["max_seqlen"] == max_seqlen
    assert same.tolist() == [LABELS[offset]]
    assert normal["step"] == 0
    assert "max_seqlen" not in data


def test_a_document_over_seq_len_is_cut_and_keeps_its_labels(batches: Batches) -> None:
    ((first, labels), (second, rest)) = batches([list(range(1, 23))])
    assert first["cu_seqlens"][0].tolist() == [0, 8, 16]
    assert first["indexes"].tolist() == [[*range(8), *range(8)]]
    assert labels.tolist() == [list(range(2, 18))]
    assert second["cu_seqlens"][0].tolist() == [0, 6, 16]
    assert second["indexes"].tolist() == [[*range(6), *range(10)]]
    assert rest.tolist() == [[18, 19, 20, 21, 22, *[-100] * 11]]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_packed_micro_batch_is_split_as_documented(batches: Batches, rank: int) -> None:
    (batch,) = batches(SENTENCES, micro_batches=2)
    data, labels = split_data_sequence_parallel(*packed_data_normalizer(*load_micro_batch(batch, 0)), rank, 2)
    part = slice(8 * rank, 8 * rank + 8)
    assert data["input_ids"].tolist() == [INPUT_IDS[0][part]]
    assert data["indexes"].tolist() == INDEXES[0][part]
    assert labels.tolist() == [LABELS[0][part]]
    assert data["cu_seqlens"].tolist() == CU_SEQLENS[0]


# fmt: off
UNPACKED_SENTENCES = [
    *SENTENCES[:3],
    [24, 2562, 5, 25, 356, 3145, 246, 25, 1451, 67, 73, 541, 265],
    [4524, 2465, 562, 67, 26, 265, 21, 256, 145, 1345],
    [34, 14],
]
UNPACKED_IDS = [
    [2323, 442, 252, 341, 233, 3442, 322, 31, 2514, 49731, 51, 0, 0, 0, 0, 0],
    [4326, 427, 465, 22, 314, 9725, 346, 1343, 24, 2562, 5, 25, 356, 3145, 246, 25],
    [4524, 2465, 562, 67, 26, 265, 21, 256, 34, 14, 0, 0, 0, 0, 0, 0],
]
UNPACKED_LABELS = [
    [442, 252, 341, -100, 3442, 322, 31, 2514, 49731, 51, -100, -100, -100, -100, -100, -100],
    [427, 465, 22, 314, 9725, 346, 1343, -100, 2562, 5, 25, 356, 3145, 246, 25, -100],
    [2465, 562, 67, 26, 265, 21, 256, -100, 14, -100, -100, -100, -100, -100, -100, -100],
]
# fmt: on
UNPACKED = {"layout": "internevo_unpacked", "strategy": "internevo_unpacked", "overlong": "truncate"}


def test_six_sentences_make_the_documented_unpacked_packs(batches: Batches) -> None:
    steps = batches(UNPACKED_SENTENCES, **UNPACKED)
    assert [data["input_ids"].tolist() for data, _ in steps] == [[row] for row in UNPACKED_IDS]
    assert [labels.tolist() for _, labels in steps] == [[row] for row in UNPACKED_LABELS]
    assert [data["cu_seqlens"][0].tolist() for data, _ in steps] == [[0, 4, 11, 16], [0, 8, 16], [0, 8, 10, 16]]


def test_a_micro_batch_is_unpacked_and_split_as_documented(batches: Batches) -> None:
    batch = batches(UNPACKED_SENTENCES, **UNPACKED)[0]
    data, labels = unpack_data(*load_micro_batch(batch, 0), seq_len=8)
    assert set(data) == {"input_ids", "step"}
    assert data["input_ids"].tolist() == [[2323, 442, 252, 341, 0, 0, 0, 0], [233, 3442, 322, 31, 2514, 49731, 51, 0]]
    expected = [[442, 252, 341, -100, -100, -100, -100, -100], [3442, 322, 31, 2514, 49731, 51, -100, -100]]
    assert labels.tolist() == expected
    parts = [split_data_sequence_parallel(data, labels, rank, 2) for rank in (0, 1)]
    assert [part["input_ids"].tolist() for part, _ in parts] == [
        [[2323, 442, 252, 341], [233, 3442, 322, 31]],
        [[0, 0, 0, 0], [2514, 49731, 51, 0]],
    ]
    assert [part.tolist() for _, part in parts] == [
        [[442, 252, 341, -100], [3442, 322, 31, 2514]],
        [[-100, -100, -100, -100], [49731, 51, -100, -100]],
    ]


def test_a_pack_with_too_few_samples_unpacks_to_rows_of_padding(batches: Batches) -> None:
    for sample, row in (([1, 2, 3], [1, 2, 3, 0, 0, 0, 0, 0]), ([*range(1, 9)], [*range(1, 9)])):
        ((data, labels),) = batches([sample], **UNPACKED)
        unpacked, targets = unpack_data(data, labels, seq_len=8)
        assert unpacked["input_ids"].tolist() == [row, [0] * 8]
        assert targets.tolist() == [[*sample[1:], *[-100] * (9 - len(sample))], [-100] * 8]


def test_packs_that_do_not_fit_the_rows_are_refused(batches: Batches) -> None:
    with pytest.raises(InvalidRequest, match="has 3 samples of up to 7 tokens, and unpacked it holds 2 of 8"):
        batches(SENTENCES, layout="internevo_unpacked")


def test_an_unknown_layout_and_a_misplaced_collator_are_refused(batches: Batches) -> None:
    with pytest.raises(InvalidRequest, match="use one of internevo, internevo_unpacked, xtuner, padded"):
        batches(SENTENCES, layout="flat")
    assert batches(SENTENCES, layout=lambda packs, step: (step, len(packs))) == [(0, 1), (1, 1)]


def test_packs_in_another_order_or_from_elsewhere_are_copied(batches: Batches) -> None:
    seen: list[Pack] = []
    batches(SENTENCES, layout=lambda packs, step: seen.extend(packs), micro_batches=2)
    assert load_batch(seen)[0]["input_ids"].tolist() == INPUT_IDS
    data, labels = load_batch([seen[1], seen[0], seen[1]])
    assert data["input_ids"].tolist() == [INPUT_IDS[1], INPUT_IDS[0], INPUT_IDS[1]]
    assert labels.tolist() == [LABELS[1], LABELS[0], LABELS[1]]
    apart = [replace(pack, labels=pack.labels.copy()) for pack in seen]
    assert load_batch(apart)[1].tolist() == LABELS
