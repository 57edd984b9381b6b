"""Layout padded: one row a segment, real tokens first, labels left for the model to shift."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from packhouse.client.dataset import Options, PackedDataset
from packhouse.client.padded import padded
from packhouse.client.plan import PlanFile
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.plans import build_plan

Memory = Callable[[], Any]
Write = Callable[..., str]


@pytest.fixture
def rows(memory_store: Memory, write_dataset: Write) -> Callable[..., list[Any]]:
    def build(
        samples: list[list[int]],
        masks: list[list[int]] | None = None,
        layout: Any = "padded",
        pad_id: int = 2,
        **spec: Any,
    ) -> list[Any]:
        store = memory_store()
        request = PlanSpec(datasets=[write_dataset(store, samples, masks)], **{"pack_length": 8, "seed": None, **spec})
        plan = PlanFile.open(store, build_plan(store, request).id)
        return list(PackedDataset(plan, store, layout=layout, options=Options(pad_id=pad_id)))

    return build


def test_rows_are_padded_on_the_right(rows: Callable[..., list[Any]]) -> None:
    ((batch,),) = rows([[11, 12], [21, 22, 23, 24, 25]], strategy="internevo")
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[11, 12, 2, 2, 2], [21, 22, 23, 24, 25]],
        "attention_mask": [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]],
        "labels": [[-100, 12, -100, -100, -100], [-100, 22, 23, 24, 25]],
        "position_ids": [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]],
    }
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_the_mask_comes_from_lengths_and_not_from_ids(rows: Callable[..., list[Any]]) -> None:
    """A sample that ends with the padding id keeps its label there."""
    ((batch,),) = rows([[7, 2], [8, 9, 2]], strategy="internevo")
    assert batch["labels"].tolist() == [[-100, 2, -100], [-100, 9, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]


def test_masked_tokens_are_not_trained(rows: Callable[..., list[Any]]) -> None:
    ((batch,),) = rows([[1, 2, 3, 4]], [[1, 0, 1, 0]])
    assert batch["labels"].tolist() == [[-100, -100, 3, -100]]


def test_all_arrays_reach_a_multiple(rows: Callable[..., list[Any]]) -> None:
    ((batch,),) = rows([[11, 12, 13], [21, 22]], layout=partial(padded, pad_id=2, multiple=8), strategy="internevo")
    assert {tuple(tensor.shape) for tensor in batch.values()} == {(2, 8)}


def test_an_empty_pack_is_a_row_without_labels(rows: Callable[..., list[Any]]) -> None:
    (step,) = rows([[1, 2, 3]], ranks=2)
    assert [batch["attention_mask"].sum().item() for batch in step] == [3, 0]
    assert step[1]["input_ids"].tolist() == [[2]]
    assert step[1]["labels"].tolist() == [[-100]]


def test_a_perfect_model_has_no_loss_and_a_copier_has(rows: Callable[..., list[Any]]) -> None:
    """Labels are shifted once in all: a model that shifts them and knows the next token has loss 0."""
    ((batch,),) = rows([[1, 2, 3, 4, 5]])
    targets = batch["labels"][:, 1:]
    knows, copies = batch["input_ids"][:, 1:], batch["input_ids"][:, :-1]
    assert torch.equal(knows, targets)
    assert not torch.equal(copies, targets)
