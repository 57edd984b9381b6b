"""The lookup: what is remembered, and why a block is a miss."""

from dataclasses import replace
from typing import Any

import pytest

from packhouse.worker.lookup import (
    RECIPES_SEEN,
    Lookup,
    changes_between,
    failed_parts,
    look_up,
    note_audit_failed,
    note_recipe,
    note_seen,
    remember_blocks,
    remembered_blocks,
)
from packhouse.worker.recipe import Recipe
from packhouse.worker.sources import Block, Fingerprint
from packhouse.worker.work import Scanned

RECIPE = Recipe(1, "chat", "messages", "t" * 32, "{{ x }}", "assistant", None, 2, 8, "truncate")
A, B = "a" * 32, "b" * 32


class Memory(dict[str, bytes]):
    """An index in memory."""

    def get(self, keys: list[str]) -> dict[str, bytes]:  # type: ignore[override]
        return {key: self[key] for key in keys if key in self}

    def put(self, items: dict[str, bytes]) -> None:
        self.update(items)


def seen(index: Memory, *digests: str, recipe: Recipe = RECIPE) -> None:
    note_recipe(recipe, index)
    note_seen(digests, recipe, index)


def reasons(index: Memory, store: Any, recipe: Recipe, *digests: str) -> dict[str, str]:
    keys = {digest: recipe.shard_key(digest) for digest in digests}
    return {digest: why.reason for digest, why in look_up(keys, recipe, store, index, ()).misses.items()}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "evicted"),
        ({"tokenizer": "u" * 32}, "tokenizer"),
        ({"template": "{{ y }}"}, "template"),
        ({"max_length": 9}, "max_length"),
        ({"max_length": None, "overflow": None}, "max_length"),
        ({"loss": "all"}, "loss"),
        ({"eos_id": None}, "eos_id"),
        ({"overflow": "drop"}, "overflow"),
        ({"field": "conversation"}, "field"),
        ({"format": 2}, "format"),
        ({"tokenizer": "u" * 32, "template": "{{ y }}", "eos_id": 7}, "tokenizer"),
        ({"kind": "text", "template": None, "loss": "all", "field": "text"}, "kind"),
    ],
)
def test_the_reason_is_the_part_that_changed(change: dict[str, Any], reason: str, memory_store: type[Any]) -> None:
    index, recipe = Memory(), replace(RECIPE, **change)
    seen(index, A)
    assert reasons(index, memory_store(), recipe, A, B) == {A: reason, B: "new_block"}
    changes = changes_between(RECIPE.to_json(), recipe.to_json())
    assert {one.field: one.new for one in changes} == change
    assert {one.field: one.old for one in changes} == {name: getattr(RECIPE, name) for name in change}


def test_the_reason_is_told_against_the_nearest_recipe_of_the_latest(memory_store: type[Any]) -> None:
    index, store = Memory(), memory_store()
    seen(index, A, B)
    seen(index, A, recipe=replace(RECIPE, max_length=9, eos_id=5))
    assert reasons(index, store, RECIPE, A, B) == {A: "evicted", B: "evicted"}, "both were made by it before"
    other = replace(RECIPE, max_length=9, eos_id=6)
    assert reasons(index, store, other, A, B) == {A: "eos_id", B: "max_length"}


def test_what_is_remembered_of_a_block_is_bounded(memory_store: type[Any]) -> None:
    index = Memory()
    for length in range(1, 30):
        seen(index, A, recipe=replace(RECIPE, max_length=length))
    assert len(index[f"seen:{A}"]) == 32 * RECIPES_SEEN
    assert reasons(index, memory_store(), replace(RECIPE, max_length=29), A) == {A: "evicted"}
    assert reasons(index, memory_store(), replace(RECIPE, max_length=1), A) == {A: "max_length"}


def test_a_lost_index_costs_reasons_and_nothing_else(memory_store: type[Any]) -> None:
    index = Memory()
    seen(index, A)
    del index[f"recipe:{RECIPE.digest}"]
    assert reasons(index, memory_store(), replace(RECIPE, max_length=9), A) == {A: "new_block"}
    assert look_up({}, RECIPE, memory_store(), Memory(), ()) == Lookup({}, {}, {})


def test_blocks_are_remembered_under_the_fingerprint_of_a_settled_source() -> None:
    index = Memory()
    kept, fresh = Fingerprint("/a", 5, 1, 2, 3), Fingerprint("/b", 5, 1, 2, 3)
    blocks = (Block("/a", 0, 3, 0, 1, A), Block("/a", 3, 2, 1, 1, B))
    remember_blocks([Scanned(kept, blocks, True), Scanned(fresh, blocks, False)], index)
    assert remembered_blocks([kept, fresh], index) == {"/a": blocks}
    fields: list[dict[str, Any]] = [{"size": 9}, {"mtime_ns": 9}, {"ctime_ns": 9}, {"inode": 9}]
    for changed in fields:
        assert remembered_blocks([replace(kept, **changed)], index) == {}


def test_an_empty_source_is_remembered_too() -> None:
    index = Memory()
    empty = Fingerprint("/a", 0, 1, 2, 3)
    remember_blocks([Scanned(empty, (), True)], index)
    assert remembered_blocks([empty], index) == {"/a": ()}


@pytest.mark.parametrize(
    ("parts", "other_tokenizer", "other_template"),
    [(["engine"], False, True), (["renderer"], True, False), (["engine", "renderer"], True, True)],
)
def test_a_failed_audit_is_remembered_for_the_tokenizer_or_the_template(
    parts: list[str], other_tokenizer: bool, other_template: bool
) -> None:
    index = Memory()
    assert not failed_parts(RECIPE, index)
    note_audit_failed(RECIPE, parts, index)
    assert failed_parts(replace(RECIPE, max_length=9), index) == set(parts)
    assert bool(failed_parts(replace(RECIPE, tokenizer="u" * 32), index)) is other_tokenizer
    assert bool(failed_parts(replace(RECIPE, template="{{ y }}"), index)) is other_template
    assert not failed_parts(replace(RECIPE, tokenizer="u" * 32, template=None), index)
