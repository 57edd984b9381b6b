"""The lookup: what is remembered, and why a block is a miss."""

from dataclasses import replace
from typing import Any

import pytest

from packhouse.worker.lookup import (
    audit_failed,
    miss_reasons,
    note_audit_failed,
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
def test_the_reason_is_the_part_that_changed(change: dict[str, Any], reason: str) -> None:
    index = Memory()
    note_seen([A], RECIPE, index)
    assert miss_reasons([A, B], replace(RECIPE, **change), index) == {A: reason, B: "new_block"}


def test_the_reason_is_told_against_the_last_recipe() -> None:
    index = Memory()
    note_seen([A, B], RECIPE, index)
    note_seen([A], replace(RECIPE, max_length=9), index)
    assert miss_reasons([A, B], replace(RECIPE, max_length=9, loss="all"), index) == {A: "loss", B: "loss"}
    assert miss_reasons([A, B], RECIPE, index) == {A: "max_length", B: "evicted"}


def test_a_lost_index_costs_reasons_and_nothing_else() -> None:
    index = Memory()
    note_seen([A], RECIPE, index)
    del index[f"recipe:{RECIPE.digest}"]
    assert miss_reasons([A], RECIPE, index) == {A: "new_block"}
    assert miss_reasons([], RECIPE, Memory()) == {}


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
    assert not audit_failed(RECIPE, index)
    note_audit_failed(RECIPE, parts, index)
    assert audit_failed(replace(RECIPE, max_length=9), index)
    assert audit_failed(replace(RECIPE, tokenizer="u" * 32), index) is other_tokenizer
    assert audit_failed(replace(RECIPE, template="{{ y }}"), index) is other_template
    assert not audit_failed(replace(RECIPE, tokenizer="u" * 32, template=None), index)
