"""Provenance: by what a shard was made decides what an audit's failure takes back, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.worker.cache_place import CachePlace, write

from packhouse.client.digest import sealed, unsealed
from packhouse.client.format import manifest_path, receipt_path
from packhouse.client.receipt_file import read_receipt
from packhouse.client.store import LocalStore
from packhouse.worker.lookup import note_audit_failed
from packhouse.worker.provenance import suspect
from packhouse.worker.recipe import resolve

CHAT: dict[str, Any] = {"kind": "chat"}


@pytest.fixture
def place(tmp_path: Path, rare: Path) -> CachePlace:
    """A cache with a tokenizer that the fast engine takes."""
    return CachePlace(LocalStore(tmp_path / "store"), rare)


def chats(path: Path) -> Path:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path.write_text(json.dumps({"messages": turns}) + "\n")
    return path


def fail(place: CachePlace, part: str, **fields: Any) -> None:
    recipe = resolve(place.spec(Path("/none"), **fields), place.store).recipe_
    note_audit_failed(recipe, [part], place.index)


def made_by(place: CachePlace) -> list[dict[str, Any]]:
    keys = [Path(key).stem for key in place.store.list("shards") if key.endswith(".json")]
    return [read_receipt(place.store, key).made_by for key in keys]


def test_b009_a_shard_says_by_what_it_was_made_and_a_manifest_does_not(place: CachePlace, tmp_path: Path) -> None:
    text = place.run(write(tmp_path / "a.jsonl", "a"))
    chat = place.run(chats(tmp_path / "b.jsonl"), **CHAT)
    plain, rendered = sorted(made_by(place), key=len)
    assert plain.keys() == {"packhouse", "engine"}
    assert plain["engine"].startswith("gigatoken ")
    assert rendered["renderer"].startswith("minijinja ")
    for outcome in (text, chat):
        assert b"gigatoken" not in bytes(place.store.open(manifest_path(outcome.dataset_id)))


@pytest.mark.parametrize("part", ["engine", "renderer"])
def test_after_an_audit_failed_hits_of_the_failed_part_are_misses_and_the_dataset_stays(
    place: CachePlace, tmp_path: Path, part: str
) -> None:
    path = chats(tmp_path / "a.jsonl")
    before = place.run(path, **CHAT)
    manifest = bytes(place.store.open(manifest_path(before.dataset_id)))
    fail(place, part, **CHAT)
    assert place.run(path, **CHAT) == before
    assert (place.last.misses, place.last.hits) == ({"audit": 1}, 0)
    assert [one.reason for one in place.last.why] == ["audit"]
    assert bytes(place.store.open(manifest_path(before.dataset_id))) == manifest, "whichever engine made it"
    assert made_by(place)[0][part].startswith({"engine": "tokenizers ", "renderer": "jinja2 "}[part])
    assert place.run(path, **CHAT) == before
    assert (place.last.misses, place.last.hits) == ({}, 1), "what is proven slow made it"


def test_an_audit_that_failed_for_another_tokenizer_or_template_takes_nothing_back(
    place: CachePlace, tmp_path: Path, tiny: Path
) -> None:
    path = write(tmp_path / "a.jsonl", "a")
    place.run(path)
    fail(place, "engine", tokenizer=str(tiny))
    fail(place, "renderer", **CHAT)
    place.run(path)
    assert place.last.hits == 1


def test_a_receipt_of_before_is_read_and_trusted_until_an_audit_fails(place: CachePlace, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "a")
    outcome = place.run(path)
    key = receipt_path(outcome.blocks[0]["shard"])
    body = unsealed(bytes(place.store.open(key)))
    del body["made_by"]
    place.store.write(key, sealed(body))
    assert place.run(path) == outcome
    assert place.last.hits == 1
    fail(place, "engine")
    assert place.run(path) == outcome
    assert place.last.misses == {"audit": 1}


@pytest.mark.parametrize(
    ("made", "failed", "taken_back"),
    [
        ({}, (), False),
        ({}, ("engine",), True),
        ({"engine": "gigatoken 1"}, ("engine",), True),
        ({"engine": "gigatoken 1"}, ("renderer",), False),
        ({"engine": "tokenizers 1", "renderer": "minijinja 3"}, ("engine",), False),
        ({"engine": "tokenizers 1", "renderer": "minijinja 3"}, ("engine", "renderer"), True),
        ({"engine": "gigatoken 1", "renderer": "jinja2 3"}, ("renderer",), False),
    ],
)
def test_what_is_suspect(made: dict[str, str], failed: tuple[str, ...], taken_back: bool) -> None:
    assert suspect(made, failed) is taken_back
