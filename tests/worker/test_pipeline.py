"""Caching jobs on a real Ray: hits and misses, changes, bad records, dead workers and full disks."""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from packhouse.client.errors import Unavailable
from packhouse.client.format import data_path, meta_path, read_manifest, read_shard, receipt_path
from packhouse.client.store import TEMPORARY, LocalStore
from packhouse.client.wire import JobSpec, Progress
from packhouse.worker import crew, encoding, pipeline, scanning, sources, work
from packhouse.worker.executor import Executor
from packhouse.worker.pipeline import BadRecords, Cancelled, Outcome
from packhouse.worker.recipe import resolve
from packhouse.worker.sources import SourceChanged
from packhouse.worker.tokenize import TooLong


class Memory(dict[str, bytes]):
    """An index in memory."""

    def get(self, keys: list[str]) -> dict[str, bytes]:  # type: ignore[override]
        return {key: self[key] for key in keys if key in self}

    def put(self, items: dict[str, bytes]) -> None:
        self.update(items)


class Wrapped:
    """An executor that has the workers call a function around what they are given to do."""

    def __init__(self, inner: Executor, around: Callable[..., Any], name: str = "encode_blocks") -> None:
        self._inner, self._around, self._name = inner, around, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if function.__name__ != self._name:
            return self._inner.submit(function, *args, **kwargs)
        return self._inner.submit(self._around, function, *args, **kwargs)


@dataclass
class Place:
    """A store, an index and an executor, and jobs run on them."""

    store: LocalStore
    index: Memory
    executor: Any
    tokenizer: Path
    progress: list[Progress]

    def run(self, *sources: Path, cancelled: threading.Event | None = None, **fields: Any) -> Outcome:
        spec = JobSpec(**{"sources": [str(source) for source in sources], "tokenizer": str(self.tokenizer)} | fields)
        self.progress.clear()
        return pipeline.run(
            spec,
            resolve(spec, self.store),
            store=self.store,
            index=self.index,
            executor=self.executor,
            on_progress=self.progress.append,
            cancelled=cancelled or threading.Event(),
        )

    @property
    def last(self) -> Progress:
        return self.progress[-1]

    def texts(self, outcome: Outcome) -> list[list[int]]:
        """The ids of every sample of a dataset, read through the client's own reader."""
        found = []
        for receipt in read_manifest(self.store, outcome.dataset_id).shards:
            shard = read_shard(self.store, receipt)
            found += [ids.tolist() for ids in np.split(shard.input_ids, shard.offsets[1:-1])] if receipt.rows else []
        return found

    def files(self) -> set[str]:
        return {*self.store.list("shards"), *self.store.list("datasets")}

    def temporaries(self) -> list[Path]:
        return list((self.store.root / TEMPORARY).glob("*"))


@pytest.fixture
def place(tmp_path: Path, tiny: Path, executor: Executor) -> Place:
    return Place(LocalStore(tmp_path / "store"), Memory(), executor, tiny, [])


def write(path: Path, *texts: str, settled: bool = True) -> Path:
    """Write a source; a settled one is as old as its times must be before they are trusted."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    if settled:
        wait_for_age(path)
    return path


def wait_for_age(path: Path) -> None:
    while time.time_ns() - path.stat().st_ctime_ns < 110_000_000:
        time.sleep(0.01)


def many(folder: Path, count: int = 12) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = [write(folder / f"{index:02}.jsonl", f"text {index}", "x", settled=False) for index in range(count)]
    wait_for_age(paths[-1])
    return paths


@pytest.fixture
def each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block is a task of its own."""
    monkeypatch.setattr(encoding, "TASK_BLOCKS", 1)


def test_a_second_run_is_all_hits_and_reads_nothing(place: Place, tmp_path: Path) -> None:
    paths = many(tmp_path / "in")
    first = place.run(*paths)
    assert (place.last.misses, place.last.hits, place.last.blocks_done) == ({"new_block": 12}, 0, 12)
    assert place.last.bytes_read == 2 * place.last.bytes == 2 * sum(source.stat().st_size for source in paths)
    before = place.files()
    second = place.run(*paths)
    assert second == first
    assert (place.last.hits, place.last.misses, place.last.bytes_read, place.last.engines) == (12, {}, 0, {})
    assert (place.last.rows, place.last.bytes_done, place.last.phase) == (24, place.last.bytes, "done")
    assert place.files() == before


def test_what_is_stored_is_what_was_read(place: Place, tmp_path: Path) -> None:
    outcome = place.run(write(tmp_path / "a.jsonl", "a", "", "ab"))
    assert place.texts(outcome) == [[69, 2], [2], [261, 2]]
    (block,) = outcome.blocks
    assert (block["source"], block["offset"], block["first_line"], block["lines"]) == (
        str(tmp_path / "a.jsonl"),
        0,
        0,
        3,
    )


def test_b025_an_edit_that_keeps_size_and_mtime_is_seen(place: Place, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "aaaa")
    first, info = place.run(path), path.stat()
    write(path, "bbbb", settled=False)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    wait_for_age(path)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (info.st_size, info.st_mtime_ns)
    second = place.run(path)
    assert second.dataset_id != first.dataset_id
    assert place.texts(second) == [[70, 70, 70, 70, 2]]
    assert place.last.misses == {"new_block": 1}


def test_a_file_as_fresh_as_the_clock_is_coarse_is_not_remembered(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for letter in ("aaaa", "bbbb", "cccc"):
        write(path, letter, settled=False)
        assert place.texts(place.run(path)) == [[*[69 + "abc".index(letter[0])] * 4, 2]]
        if time.time_ns() - path.stat().st_ctime_ns < 60_000_000:
            assert not [key for key in place.index if key.startswith("cuts:")]
    wait_for_age(path)
    place.run(path)
    place.run(path)
    assert place.last.bytes_read == 0


def test_a_source_that_changes_while_it_is_scanned_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", "aaaa")
    assert work.scan_sources([str(path)])[0].settled

    def scan_and_touch(name: str, documents: str) -> Any:
        blocks = sources.scan(name, documents)
        os.utime(name)
        return blocks

    monkeypatch.setattr(work, "scan", scan_and_touch)
    assert not work.scan_sources([str(path)])[0].settled


def test_a_copied_file_is_a_hit_under_its_new_name(place: Place, tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", "a", "b")
    first = place.run(one)
    copy = tmp_path / "renamed.jsonl"
    shutil.copy(one, copy)
    wait_for_age(copy)
    second = place.run(copy)
    assert second.dataset_id == first.dataset_id, "content, not paths"
    assert (place.last.hits, place.last.misses) == (1, {})


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ({}, {"max_length": 2}, "max_length"),
        ({}, {"add_eos": False}, "eos_id"),
        ({}, {"kind": "chat", "messages_field": "text", "max_bad_share": 1}, "kind"),
        (
            {"kind": "chat", "max_bad_share": 1},
            {"kind": "chat", "max_bad_share": 1, "template": "{{ messages[0].content }}", "loss": "all"},
            "template",
        ),
    ],
)
def test_a_miss_says_which_part_changed(
    place: Place, tmp_path: Path, first: dict[str, Any], second: dict[str, Any], reason: str
) -> None:
    path = write(tmp_path / "a.jsonl", "a")
    if "kind" in first:
        path.write_text('{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n')
    before = place.run(path, **first)
    after = place.run(path, **second)
    assert place.last.misses == {reason: 1}
    assert after.dataset_id != before.dataset_id
    assert place.run(path, **first) == before
    assert (place.last.hits, place.last.misses) == (1, {})


def test_another_tokenizer_damage_and_eviction_are_told_apart(place: Place, tmp_path: Path, rare: Path) -> None:
    path = write(tmp_path / "a.jsonl", "a")
    outcome = place.run(path)
    key = outcome.blocks[0]["shard"]
    whole = bytes(place.store.open(data_path(key)))
    place.store.write(data_path(key), whole[:-1])
    assert place.run(path) == outcome
    assert place.last.misses == {"damaged": 1}
    assert bytes(place.store.open(data_path(key))) == whole
    for name in (receipt_path, data_path, meta_path):
        place.store.delete(name(key))
    assert place.run(path) == outcome
    assert place.last.misses == {"evicted": 1}
    place.tokenizer = rare
    place.run(path)
    assert place.last.misses == {"tokenizer": 1}


def test_bad_records_are_counted_and_stand_in_the_sidecar(place: Place, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "a", "b", settled=False)
    path.write_text(path.read_text() + 'nonsense\n\n{"body": "hunter2"}\n')
    with pytest.raises(
        BadRecords, match=r"2 of 4 records cannot be used \(invalid_json 1, missing_field 1\)"
    ) as caught:
        place.run(path, max_bad_share=0.4)
    assert f"the first is {str(path)!r} line 3" in caught.value.detail
    assert "hunter2" not in str(caught.value)
    outcome = place.run(path, max_bad_share=0.5)
    assert place.last.rejected == {"invalid_json": 1, "missing_field": 1}
    assert (place.last.records, place.last.rows, place.last.hits) == (4, 2, 1)
    assert len(place.texts(outcome)) == 2


@pytest.mark.parametrize("cached", [False, True])
def test_the_first_bad_record_fails_a_job_that_asks_for_it(place: Place, tmp_path: Path, cached: bool) -> None:
    good, bad = write(tmp_path / "a.jsonl", "a"), write(tmp_path / "b.jsonl", "b")
    bad.write_text('{"text": "b"}\n\n{"text": 7}\n{"text": 8}\n')
    if cached:
        place.run(good, bad, max_bad_share=1)
    with pytest.raises(BadRecords, match=r"b\.jsonl' line 3: wrong_type, field 'text' is a number") as caught:
        place.run(good, bad, on_bad_record="fail")
    assert "quarantine" in caught.value.remedy
    assert not list(place.store.list("datasets")) or cached


def test_a_file_named_twice_is_in_the_dataset_twice_and_encoded_once(place: Place, tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", "a"), write(tmp_path / "b.jsonl", "b")
    outcome = place.run(a, b, a)
    assert place.texts(outcome) == [[69, 2], [70, 2], [69, 2]]
    assert (place.last.blocks, place.last.rows, sum(place.last.engines.values())) == (3, 3, 2)
    assert place.last.misses == {"new_block": 3}
    assert place.run(a, b, a) == outcome
    assert place.last.hits == 3


def test_b100_an_empty_file(place: Place, tmp_path: Path) -> None:
    empty, full = write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl", "a")
    both = place.run(empty, full)
    assert place.texts(both) == [[69, 2]]
    assert both.dataset_id == place.run(full).dataset_id
    alone = place.run(empty)
    manifest = read_manifest(place.store, alone.dataset_id)
    assert (manifest.rows, manifest.shards, place.last.blocks, alone.blocks) == (0, (), 0, [])


def test_b101_fewer_rows_than_workers_and_blocks_without_rows(place: Place, tmp_path: Path) -> None:
    blank = tmp_path / "blank.jsonl"
    blank.write_text("\n \n")
    outcome = place.run(blank, write(tmp_path / "a.jsonl", "a", "bb", "ccc"))
    assert [len(ids) for ids in place.texts(outcome)] == [2, 3, 4]


@pytest.mark.usefixtures("each_alone")
def test_the_order_is_that_of_the_sources_whatever_ends_first(place: Place, tmp_path: Path) -> None:
    paths = many(tmp_path / "in")

    def late(encode: Callable[..., Any], store: Any, recipe: Any, blocks: list[Any], **options: Any) -> Any:
        for block in blocks:
            time.sleep(0.1 if block.source.endswith("00.jsonl") else 0)
        return encode(store, recipe, blocks, **options)

    place.executor = Wrapped(place.executor, late)
    outcome = place.run(*paths)
    assert [block["source"] for block in outcome.blocks] == [str(source) for source in paths]
    other = Place(LocalStore(tmp_path / "other"), Memory(), place.executor, place.tokenizer, [])
    assert other.run(tmp_path / "in").dataset_id == outcome.dataset_id
    assert other.run(*reversed(paths)).dataset_id != outcome.dataset_id


def test_a_long_sample_is_named_by_file_and_line(place: Place, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "a", "bbb")
    with pytest.raises(TooLong, match=r"a\.jsonl' line 2: a sample of 4 tokens is longer than max_length 3") as caught:
        place.run(path, max_length=3, overflow="error")
    assert "truncate" in caught.value.remedy


@pytest.mark.usefixtures("each_alone")
def test_a_cancelled_job_stops_and_leaves_nothing_half_done(place: Place, tmp_path: Path) -> None:
    paths, cancelled = many(tmp_path / "in"), threading.Event()
    place.run(paths[0])

    def hang(encode: Callable[..., Any], *args: Any, **options: Any) -> Any:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            time.sleep(0.01)

    inner, place.executor = place.executor, Wrapped(place.executor, hang)
    threading.Timer(1, cancelled.set).start()
    started = time.monotonic()
    with pytest.raises(Cancelled):
        place.run(*paths, cancelled=cancelled)
    assert time.monotonic() - started < 5
    place.executor = inner
    before = time.monotonic()
    assert len(place.texts(place.run(*paths))) == 24, "the workers are free again"
    assert time.monotonic() - before < 20
    assert place.temporaries() == []


def test_a_job_cancelled_before_it_starts_does_nothing(place: Place, tmp_path: Path) -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(Cancelled):
        place.run(write(tmp_path / "a.jsonl", "a"), cancelled=cancelled)
    assert place.files() == set()


@pytest.mark.parametrize("moment", ["before the work", "in a write"])
@pytest.mark.usefixtures("each_alone")
def test_b083_a_killed_worker_changes_nothing(place: Place, tmp_path: Path, moment: str) -> None:
    paths, flag = many(tmp_path / "in"), tmp_path / "killed"

    def die(encode: Callable[..., Any], store: Any, recipe: Any, blocks: list[Any], **options: Any) -> Any:
        if blocks[0].source.endswith("05.jsonl") and not flag.exists():
            flag.write_text(str(os.getpid()))
            if moment == "before the work":
                os.kill(os.getpid(), signal.SIGKILL)
            os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        return encode(store, recipe, blocks, **options)

    undisturbed = Place(LocalStore(tmp_path / "other"), Memory(), place.executor, place.tokenizer, [])
    expected = undisturbed.run(*paths)
    place.executor = Wrapped(place.executor, die)
    outcome = place.run(*paths)
    assert not psutil.pid_exists(int(flag.read_text()))
    assert outcome == expected
    assert place.files() == undisturbed.files()
    assert place.last.rows == 24
    assert place.temporaries() == []


@pytest.mark.parametrize("times", [1, 3])
def test_a_worker_that_dies_while_it_scans_is_followed_by_another(place: Place, tmp_path: Path, times: int) -> None:
    paths, flags = [write(tmp_path / f"{name}.jsonl", name) for name in "ab"], tmp_path / "flags"
    flags.mkdir()

    def die(scan: Callable[..., Any], files: list[str], documents: str) -> Any:
        if files[0].endswith("b.jsonl") and len(list(flags.iterdir())) < times:
            (flags / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return scan(files, documents)

    expected = Place(LocalStore(tmp_path / "other"), Memory(), place.executor, place.tokenizer, []).run(*paths)
    place.executor = Wrapped(place.executor, die, "scan_sources")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scanning, "SCAN_FILES", 1)
        if times < crew.ATTEMPTS:
            assert place.run(*paths) == expected
        else:
            with pytest.raises(Unavailable, match=r"3 workers died on '.*b\.jsonl'"):
                place.run(*paths)
    assert len(list(flags.iterdir())) == times


def test_a_worker_killed_from_outside_in_mid_job(place: Place, tmp_path: Path) -> None:
    path, ready = write(tmp_path / "a.jsonl", "a"), tmp_path / "ready"
    os.mkfifo(ready)

    def wait(encode: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if ready.is_fifo():
            ready.write_text(str(os.getpid()))
            time.sleep(60)
        return encode(*args, **options)

    def kill() -> None:
        process = psutil.Process(int(ready.read_text()))
        ready.unlink()
        assert any("raylet" in parent.name() for parent in process.parents()), "a worker of this test's Ray"
        process.send_signal(signal.SIGKILL)

    place.executor = Wrapped(place.executor, wait)
    killer = threading.Thread(target=kill)
    killer.start()
    outcome = place.run(path)
    killer.join()
    assert place.texts(outcome) == [[69, 2]]


@pytest.mark.parametrize("together", [True, False])
def test_b084_a_record_that_kills_its_worker_again_and_again_fails_the_job_and_is_named(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    monkeypatch.setattr(encoding, "TASK_BLOCKS", 64 if together else 1)
    paths, deaths = many(tmp_path / "in", 4), tmp_path / "deaths"
    deadly = write(tmp_path / "deadly.jsonl", "fine", "deadly", "x")
    deaths.mkdir()

    def die(encode: Callable[..., Any], store: Any, recipe: Any, blocks: list[Any], **options: Any) -> Any:
        if any("deadly" in block.source for block in blocks):
            (deaths / str(os.getpid())).touch()
            os._exit(9)
        return encode(store, recipe, blocks, **options)

    inner, place.executor = place.executor, Wrapped(place.executor, die)
    with pytest.raises(Unavailable, match=r"3 workers died on '.*deadly\.jsonl', lines 1 to 3") as caught:
        place.run(*paths, deadly)
    assert "more memory" in caught.value.remedy
    assert len(list(deaths.iterdir())) == 3
    assert not list(place.store.list("datasets"))
    place.executor = inner
    assert len(place.texts(place.run(*paths))) == 8, "other jobs go on"


SWAPPED = {265: 266, 266: 265}


def swap(encode: Callable[..., Any], store: Any, recipe: Any, blocks: list[Any], **options: Any) -> Any:
    """Encode with an engine that takes zq for qz; no probe has either."""
    from packhouse.worker import engines, work  # in the worker's process

    original = engines.GigatokenEngine.encode

    def encode_swapped(self: Any, texts: Any) -> Any:
        encoded = original(self, texts)
        ids = np.array([SWAPPED.get(int(token), int(token)) for token in encoded.ids], np.uint32)
        return engines.Encoded(ids, encoded.offsets)

    work._TOOLKITS.clear()
    engines.GigatokenEngine.encode = encode_swapped  # type: ignore[method-assign]
    try:
        return encode(store, recipe, blocks, **options)
    finally:
        engines.GigatokenEngine.encode = original  # type: ignore[method-assign]
        work._TOOLKITS.clear()


def audited_away(texts: list[str], word: str) -> list[str]:
    """Put ``word`` into the one text that the audit passes over."""
    from packhouse.worker import engines

    for index in range(len(texts)):
        changed = [text + word if place == index else text for place, text in enumerate(texts)]
        if index not in engines._sample(changed):
            return changed
    raise AssertionError


@pytest.mark.parametrize("blocks_of_a_task", [1, 2, 64])
def test_a_wrong_engine_is_found_by_the_audit_and_its_earlier_blocks_are_done_again(
    place: Place, tmp_path: Path, rare: Path, monkeypatch: pytest.MonkeyPatch, blocks_of_a_task: int
) -> None:
    monkeypatch.setattr(encoding, "TASK_BLOCKS", blocks_of_a_task)
    place.tokenizer = rare
    # The heaviest goes first: wrong in a row that the audit does not see. The lightest is wrong in all rows.
    hidden = [
        audited_away([f"row {index} {size} " + "fill " * size for index in range(6)], " zq") for size in (60, 50, 40)
    ]
    paths = [write(tmp_path / f"{index}.jsonl", *texts, settled=False) for index, texts in enumerate(hidden)]
    seen = write(tmp_path / "seen.jsonl", " qz", " qz")
    truth = Place(LocalStore(tmp_path / "truth"), Memory(), place.executor, rare, [])
    expected = truth.texts(truth.run(*paths, seen))
    inner, place.executor = place.executor, Wrapped(place.executor, swap)
    wrong = place.texts(place.run(*paths))
    assert wrong != expected[:-2], "the probes and the audit do not see it yet"
    shutil.rmtree(place.store.root)
    outcome = place.run(*paths, seen)
    assert place.texts(outcome) == expected
    assert place.last.fallbacks["audit"] == 1
    assert (place.last.rows, place.last.tokens) == (20, sum(map(len, expected)))
    assert place.last.blocks_done == place.last.blocks == 4
    place.executor = inner
    shutil.rmtree(place.store.root)
    place.run(*paths)
    assert place.last.engines == {"huggingface": 3}, "the tokenizer stays with the engine that is right"


def test_a_renderer_found_wrong_has_its_earlier_blocks_done_again(
    place: Place, tmp_path: Path, chat: Any, each_alone: None
) -> None:
    own = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    template = "{% for m in messages %}{% if 'float' in m.content %}{{ 1e22 }}{% endif %}{% endfor %}" + own
    rows = [[chat("a" * 200, "b")] * 6 + [chat("float", "b")], [chat("a", "float")]]
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, records in zip(paths, rows, strict=True):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    outcome = place.run(*paths, kind="chat", template=template)
    slow = Place(LocalStore(tmp_path / "slow"), Memory(place.index), place.executor, place.tokenizer, [])
    assert [key for key in place.index if key.startswith("slow:")]
    assert place.texts(outcome) == slow.texts(slow.run(*paths, kind="chat", template=template))
    assert place.last.fallbacks["audit"] == 1
    assert slow.last.fallbacks["renderer"] == 2


def test_a_source_that_goes_or_changes_during_the_job_fails_it(place: Place, tmp_path: Path) -> None:
    for name, act, match in (
        ("gone", lambda path: path.unlink(), "cannot be read any more"),
        ("changed", lambda path: path.write_text('{"text": "b"}\n'), "changed while the job ran"),
        ("cut", lambda path: path.write_text(""), "changed while the job ran"),
    ):
        path = write(tmp_path / f"{name}.jsonl", "a")

        def meddle(encode: Callable[..., Any], *args: Any, act: Any = act, path: Path = path, **options: Any) -> Any:
            act(path)
            return encode(*args, **options)

        place_ = Place(place.store, place.index, Wrapped(place.executor, meddle), place.tokenizer, [])
        with pytest.raises(SourceChanged, match=match):
            place_.run(path)
    assert place.files() == set()


def test_a_source_that_goes_between_scan_and_stat(place: Place, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "a")

    def meddle(scan: Callable[..., Any], paths: list[str], documents: str) -> Any:
        path.unlink()
        return scan(paths, documents)

    place.executor = Wrapped(place.executor, meddle, "scan_sources")
    with pytest.raises(SourceChanged, match="cannot be read any more"):
        place.run(path)


def test_a_source_that_cannot_be_read_is_refused(place: Place, tmp_path: Path) -> None:
    with pytest.raises(SourceChanged, match="put it back"):
        place.run(tmp_path / "missing.jsonl")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return a function that mounts a small file system in memory; skip where that is not allowed."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def make(options: str) -> Path:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip(f"mounting is not allowed here: {done.stderr.decode().strip()}")
        return folder

    yield make
    subprocess.run(["umount", "-l", folder], capture_output=True, check=False)


@pytest.mark.usefixtures("each_alone")
def test_a_full_disk_fails_the_job_and_more_space_finishes_it(
    place: Place, tmp_path: Path, mount: Callable[[str], Path]
) -> None:
    folder = mount("size=500k")
    place.store = LocalStore(folder / "store")
    paths = [write(tmp_path / f"{index}.jsonl", f"{index}" * 30_000, settled=False) for index in range(12)]
    truth = Place(LocalStore(tmp_path / "truth"), Memory(), place.executor, place.tokenizer, [])
    expected = truth.run(*paths)
    with pytest.raises(Unavailable, match=r"store cannot be written .No space left on device") as caught:
        place.run(*paths)
    assert "what is finished is kept" in caught.value.remedy
    assert not list(place.store.list("datasets"))
    deadline = time.monotonic() + 10
    while place.temporaries() and time.monotonic() < deadline:
        time.sleep(0.05)  # a worker that was writing when the job failed
    assert place.temporaries() == []
    subprocess.run(["mount", "-o", "remount,size=20m", folder], check=True)
    assert place.run(*paths) == expected
    assert place.last.hits > 0
    assert place.texts(expected) == truth.texts(expected)


def test_a_read_only_store_serves_hits_and_refuses_the_rest(
    place: Place, tmp_path: Path, mount: Callable[[str], Path]
) -> None:
    folder = mount("size=20m")
    place.store = LocalStore(folder / "store")
    known, new = write(tmp_path / "a.jsonl", "a"), write(tmp_path / "b.jsonl", "b")
    outcome = place.run(known)
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    assert place.run(known) == outcome
    with pytest.raises(Unavailable, match="Read-only file system"):
        place.run(new)
    with pytest.raises(Unavailable, match="Read-only file system"):
        place.run(known, known)


def test_a_store_that_vanished_is_told(place: Place, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "a")

    def vanish(encode: Callable[..., Any], *args: Any, **options: Any) -> Any:
        shutil.rmtree(args[0].root)
        args[0].root.touch()
        return encode(*args, **options)

    place.executor = Wrapped(place.executor, vanish)
    with pytest.raises(Unavailable, match=r"the store .* cannot be (read|written)"):
        place.run(path, max_length=3)


def test_progress_only_grows_and_ends_at_all(place: Place, tmp_path: Path) -> None:
    place.run(*many(tmp_path / "in"), write(tmp_path / "long.jsonl", "x" * 1000))
    phases = [progress.phase for progress in place.progress]
    assert [phase for phase, before in zip(phases, [None, *phases], strict=False) if phase != before] == [
        "scanning",
        "encoding",
        "done",
    ]
    for name in ("blocks_done", "rows", "tokens", "bytes_done", "bytes_read"):
        values = [getattr(progress, name) for progress in place.progress]
        assert values == sorted(values)
    assert (place.last.blocks_done, place.last.bytes_done, place.last.sources) == (13, place.last.bytes, 13)
    assert sum(place.last.engines.values()) + place.last.hits == 13
