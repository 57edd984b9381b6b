"""Keys: every field of a recipe and of a job's request, changed alone, gives other shards, or is stated not to."""

from collections.abc import Callable
from dataclasses import fields, replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from packhouse.client.wire import JobSpec
from packhouse.worker.recipe import Recipe, resolve
from packhouse.worker.tokenize_fn import Custom

BLOCK = "b" * 32

RECIPE = Recipe(
    format=2,
    kind="chat",
    field="messages",
    tokenizer="t" * 32,
    template="{{ x }}",
    loss="assistant",
    bos_id=None,
    eos_id=2,
    max_length=8,
    overflow="truncate",
)
OTHER_VALUES: dict[str, Any] = {
    "format": 3,
    "kind": "text",
    "field": "turns",
    "tokenizer": "u" * 32,
    "template": "{{ y }}",
    "loss": "all",
    "bos_id": 1,
    "eos_id": None,
    "max_length": 9,
    "overflow": "drop",
    "record": "conversations",
    "fields": (("system", "sys"),),
    "now": "2025-01-01",
    "control_tokens": "text",
    "untrained": "drop",
    "tokenize": Custom("module:Class", "{}", "hash"),
}

TEMPLATE = "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}"
CHAT = {"kind": "chat", "template": TEMPLATE, "max_length": 8, "loss": "all"}
CHANGES: dict[str, Any] = {
    "format": {"format": "conversations"},
    "kind": {"kind": "text"},
    "messages_field": {"messages_field": "turns"},
    "fields": {"fields": {"messages": "turns"}},
    "template": {"template": TEMPLATE + "!"},
    "template_date": {"template_date": date(2026, 1, 1)},
    "control_tokens": {"control_tokens": "reject"},
    "loss": {"loss": "assistant", "template": None},
    "untrained": {"untrained": "drop", "loss": "assistant", "template": None},
    "add_bos": {"add_bos": True},
    "add_eos": {"add_eos": True},
    "max_length": {"max_length": 9},
    "overflow": {"overflow": "drop"},
    "tokenizer": {},
    "text_field": {"kind": "text", "template": None, "text_field": "body"},
}
"""A value for each field that changes the recipe. What is in it twice is compared with the rest of it alone."""
CHANGES_NOTHING: dict[str, Any] = {
    "priority": {"priority": 1},
    "sources": {"sources": ["/elsewhere"]},  # what they hold counts, block by block
    "documents": {"documents": "paragraph"},  # another document is another block
    "name": {"name": "again"},
    "on_bad_record": {"on_bad_record": "fail"},
    "max_bad_share": {"max_bad_share": 0.5},
}
WITH_A_FUNCTION = {"tokenize", "tokenize_options", "file_roots"}
"""Those that need a class: see test_tokenize_fn.py and the recipe's own field above."""


@pytest.mark.parametrize("name", [one.name for one in fields(Recipe)])
def test_b024_each_field_of_a_recipe_changes_the_key_and_undone_brings_it_back(name: str) -> None:
    assert name in OTHER_VALUES, f"a recipe has a new field, {name}: say here which other value changes the key"
    changed = replace(RECIPE, **{name: OTHER_VALUES[name]})
    assert getattr(changed, name) != getattr(RECIPE, name)
    assert changed.shard_key(BLOCK) != RECIPE.shard_key(BLOCK)
    assert replace(changed, **{name: getattr(RECIPE, name)}).shard_key(BLOCK) == RECIPE.shard_key(BLOCK)


@pytest.fixture
def key(memory_store: type[Any], tiny: Path) -> Callable[..., str]:
    """Return a function (fields of a job) -> key of a block's shard under it."""

    def make(**changes: Any) -> str:
        spec = JobSpec(**{"sources": ["/none"], "tokenizer": str(tiny), **CHAT, **changes})
        return resolve(spec, memory_store()).recipe_.shard_key(BLOCK)

    return make


@pytest.mark.parametrize("name", list(JobSpec.model_fields))
def test_b024_each_field_of_a_request_changes_the_key_or_is_stated_not_to(
    name: str, key: Callable[..., str], tiny: Path, rare: Path
) -> None:
    known = CHANGES.keys() | CHANGES_NOTHING.keys() | WITH_A_FUNCTION
    assert name in known, f"a job has a new field, {name}: say here whether it changes what tokens its records become"
    if name in WITH_A_FUNCTION:
        return
    if name == "tokenizer":
        assert key(tokenizer=str(rare)) != key(tokenizer=str(tiny))
        return
    change = CHANGES.get(name, CHANGES_NOTHING.get(name, {}))
    rest = {field: value for field, value in change.items() if field != name}
    assert (key(**change) == key(**rest)) is (name in CHANGES_NOTHING)
    assert key(**rest) == key(**rest), "undone, it is what it was"


def test_two_blocks_have_two_keys_and_a_block_has_one() -> None:
    assert RECIPE.shard_keys(["a", "b"]) == {"a": RECIPE.shard_key("a"), "b": RECIPE.shard_key("b")}
    assert RECIPE.shard_key("a") != RECIPE.shard_key("b")
