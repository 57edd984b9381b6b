"""The handshake: tokenizer digests are those of recipes, and a refusal says in what two plans differ."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packhouse.client import loader
from packhouse.client.dataset import PackedDataset
from packhouse.client.errors import InvalidRequest, Mismatch
from packhouse.client.handshake import tokenizer_digest
from packhouse.client.plan import PlanFile
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.plans import build_plan
from packhouse.worker.recipe import load_tokenizer

Memory = Callable[[], Any]
Write = Callable[..., str]


def test_the_digest_is_that_of_the_recipe_whatever_use_left_behind(tokenizer_dir: Path) -> None:
    from transformers import AutoTokenizer

    content, _ = load_tokenizer(str(tokenizer_dir))
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    assert tokenizer_digest(tokenizer) == tokenizer_digest(content.digest) == content.digest
    tokenizer(["one", "two words"], padding=True, truncation=True, max_length=4)
    assert tokenizer_digest(tokenizer) == content.digest
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_digest(tokenizer) != content.digest
    with pytest.raises(InvalidRequest, match="object is not a fast tokenizer"):
        tokenizer_digest(object())


def open_plan(store: Any, dataset: str, **spec: Any) -> PlanFile:
    return PlanFile.open(store, build_plan(store, PlanSpec(datasets=[dataset], **{"pack_length": 8, **spec})).id)


def test_a_refusal_says_in_what_the_plans_differ(memory_store: Memory, write_dataset: Write) -> None:
    store = memory_store()
    first, second = write_dataset(store, [[1, 2]]), write_dataset(store, [[3, 4]])
    third = write_dataset(store, [[1, 2]], tokenizer="u" * 32)
    plan = open_plan(store, first)
    dataset = PackedDataset(plan, store)
    for other, message in (
        (open_plan(store, third), f"its tokenizer is {'u' * 32}, and this one's is {'t' * 32}"),
        (open_plan(store, second), f"its datasets are {second}, and this one's are {first}"),
        (open_plan(store, first, seed=7), r"they differ in seed \(7 there, 0 here\)"),
    ):
        with pytest.raises(Mismatch, match=message):
            dataset.load_state_dict({"plan": other.id, "step": 0})
    with pytest.raises(Mismatch, match="the other is not at hand"):
        dataset.load_state_dict({"plan": "0" * 32, "step": 0})


@pytest.mark.parametrize("state", [{}, {"plan": "x"}, {"plan": "x", "step": "y"}, {"step": 1}, None])
def test_what_is_no_state_is_refused(memory_store: Memory, write_dataset: Write, state: Any) -> None:
    store = memory_store()
    dataset = PackedDataset(open_plan(store, write_dataset(store, [[1, 2]])), store)
    for one in (dataset, loader(dataset)):
        with pytest.raises(Mismatch, match="is not a state of a data set"):
            one.load_state_dict(state)
