"""Explaining: what of a job is in the cache and why the rest is not, and that looking changes nothing."""

from pathlib import Path
from typing import Any, cast

import pytest
from tests.worker.cache_place import CachePlace, Inline, write

from packhouse.client.format import data_path, meta_path, receipt_path
from packhouse.client.store import LocalStore
from packhouse.client.wire import Change
from packhouse.client.wire_explain import Explanation
from packhouse.worker.executor import Executor
from packhouse.worker.explain import explain
from packhouse.worker.recipe import resolve


@pytest.fixture
def place(tmp_path: Path, tiny: Path) -> CachePlace:
    return CachePlace(LocalStore(tmp_path / "store"), tiny)


def ask(place: CachePlace, *sources: Path, scan: bool = False, limit: int = 100, **fields: Any) -> Explanation:
    spec = place.spec(*sources, **fields)
    executor = cast(Executor, Inline(lambda blocks: None)) if scan else None
    resolved = resolve(spec, place.store)
    *_, last = explain(spec, resolved, store=place.store, index=place.index, executor=executor, limit=limit)
    assert (last.done, last.looked_up) == (True, last.blocks)
    return last


def test_a_job_that_was_done_is_all_hits_and_nothing_is_listed(place: CachePlace, tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", name) for name in "ab"]
    place.run(*paths)
    found = ask(place, *paths)
    assert (found.sources, found.blocks, found.hits, found.unscanned) == (2, 2, 2, 0)
    assert (found.misses, found.listed, found.hit_bytes) == ([], [], found.bytes)


def test_what_changed_is_told_by_source_old_and_new_value_side_by_side(place: CachePlace, tmp_path: Path) -> None:
    names = ("old", "new", "gone", "cut", "lost")
    old, new, gone, cut, lost = (write(tmp_path / f"{name}.jsonl", name) for name in names)
    place.run(old, max_length=5)
    evicted, damaged, torn = (place.run(path, max_length=9).blocks[0]["shard"] for path in (gone, cut, lost))
    for path in (receipt_path, data_path, meta_path):
        place.store.delete(path(evicted))
    place.store.write(data_path(damaged), b"cut")
    place.store.delete(receipt_path(torn))
    ask(place, new, scan=True)
    found = ask(place, old, new, gone, cut, lost, max_length=9)
    reasons = {Path(one.source).stem: miss.reason for one in found.listed for miss in one.misses}
    expected = {"old": "max_length", "new": "new_block", "gone": "evicted", "cut": "damaged", "lost": "damaged"}
    assert reasons == expected
    (miss,) = found.listed[0].misses
    assert miss.changes == [Change(field="max_length", old=5, new=9)]
    assert miss.recipe == resolve(place.spec(old, max_length=5), place.store).digest
    assert sorted(miss.reason for miss in found.misses) == ["damaged", "evicted", "max_length", "new_block"]
    assert sum(miss.bytes for miss in found.misses) == found.bytes


def test_every_field_that_changed_is_told_those_first_that_say_most(
    place: CachePlace, tmp_path: Path, rare: Path
) -> None:
    path = write(tmp_path / "a.jsonl", "a")
    place.run(path)
    (miss,) = ask(place, path, tokenizer=str(rare), max_length=4, add_eos=False).misses
    assert [change.field for change in miss.changes] == ["tokenizer", "max_length", "eos_id", "overflow"]
    assert miss.reason == "tokenizer"


def test_a_source_that_is_new_is_named_and_only_read_when_asked(place: CachePlace, tmp_path: Path) -> None:
    known, new = write(tmp_path / "a.jsonl", "a"), write(tmp_path / "b.jsonl", "b")
    place.run(known)
    found = ask(place, known, new)
    assert (found.blocks, found.hits, found.unscanned, found.unscanned_bytes) == (1, 1, 1, new.stat().st_size)
    assert [(one.source, one.scanned) for one in found.listed] == [(str(new), False)]
    scanned = ask(place, known, new, scan=True)
    assert (scanned.blocks, scanned.hits, scanned.unscanned) == (2, 1, 0)
    again = ask(place, known, new)
    assert again == scanned.model_copy(update={"seconds": again.seconds}), "what was scanned is kept"


def test_looking_makes_and_changes_nothing(place: CachePlace, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "a")
    place.run(path)
    ask(place, path, max_length=3)
    files = {key: bytes(place.store.open(key)) for key in place.store.list("shards")}
    index = dict(place.index)
    ask(place, path, max_length=3)
    assert {key: bytes(place.store.open(key)) for key in place.store.list("shards")} == files
    assert dict(place.index) == index
    place.run(path)
    assert place.last.hits == 1


def test_what_is_listed_is_bounded_and_the_sums_are_not(place: CachePlace, tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", name) for name in "abcd"]
    place.run(*paths)
    found = ask(place, *paths, limit=2, add_bos=True)
    assert [Path(one.source).stem for one in found.listed] == ["a", "b"]
    assert found.misses[0].blocks == 4


def test_what_a_job_tells_of_itself_is_what_was_explained_before(place: CachePlace, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "a")
    place.run(path)
    expected = ask(place, path, max_length=3)
    place.run(path, max_length=3)
    assert place.last.why == expected.misses
    assert {miss.reason: miss.blocks for miss in place.last.why} == place.last.misses
    place.run(path, max_length=3)
    assert place.last.why == []


def test_a_meta_file_that_is_gone_is_damage(place: CachePlace, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "a")
    place.store.delete(meta_path(place.run(path).blocks[0]["shard"]))
    assert [miss.reason for miss in ask(place, path).misses] == ["damaged"]


def test_it_tells_how_far_it_is(place: CachePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", text) for name, text in (("a", "x"), ("b", "y"), ("c", "x"))]
    place.run(*paths)
    monkeypatch.setattr("packhouse.worker.explain.AT_ONCE", 1)
    spec = place.spec(*paths)
    steps = list(explain(spec, resolve(spec, place.store), store=place.store, index=place.index))
    assert [(step.looked_up, step.hits, step.done) for step in steps] == [
        *((0, 0, False), (1, 1, False), (2, 2, False), (3, 3, False)),
        (3, 3, True),
    ]
    assert {step.blocks for step in steps} == {3}
