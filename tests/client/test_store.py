"""The store in a folder: whole files or none, and nothing outside it."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from packhouse.client.errors import InvalidRequest, NotFound, Unavailable
from packhouse.client.store import ABANDONED_SECONDS, TEMPORARY, LocalStore


def temporaries(store: LocalStore) -> list[str]:
    return sorted(path.name for path in (store.root / TEMPORARY).glob("*"))


@pytest.mark.parametrize(
    "data", [b"", b"abc", bytearray(b"x"), memoryview(b"ab"), pa.py_buffer(b"z"), np.arange(5), np.zeros(0, np.int64)]
)
def test_what_is_written_is_read(tmp_path: Path, data: Any) -> None:
    store = LocalStore(tmp_path / "deep" / "root")
    store.write("a/b/c", data)
    expected = bytes(memoryview(data))
    assert bytes(store.open("a/b/c")) == expected
    assert store.size("a/b/c") == len(expected)
    assert list(store.list("a")) == ["a/b/c"]
    assert temporaries(store) == []


def test_what_is_not_there(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert store.size("a/b") is None
    assert list(store.list("a")) == []
    store.delete("a/b")
    with pytest.raises(NotFound, match="has no a/b"):
        store.open("a/b")
    assert store.sweep() == 0


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "./a", "a/./b", "a\0b", ".."])
def test_no_key_leaves_the_store(tmp_path: Path, key: str) -> None:
    store = LocalStore(tmp_path)
    for call in (
        store.open,
        store.size,
        store.delete,
        lambda name: store.write(name, b"x"),
        lambda n: list(store.list(n)),
    ):
        with pytest.raises(InvalidRequest, match="not a store key"):
            call(key)


def test_keys_are_listed_by_bytes(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    names = ["d/b", "d/A10", "d/a", "d/é", "d/a.x/y", "e/other"]
    for name in names:
        store.write(name, b"x")
    assert list(store.list("d")) == sorted(names[:-1], key=lambda name: [part.encode() for part in name.split("/")])


def test_a_reader_keeps_what_it_opened(tmp_path: Path) -> None:
    """Its map is of the old file: neither zeros nor a bus error."""
    store = LocalStore(tmp_path)
    store.write("a", b"old" * 100_000)
    opened = store.open("a")
    store.write("a", b"new")
    assert bytes(opened) == b"old" * 100_000
    assert bytes(store.open("a")) == b"new"
    store.delete("a")
    assert bytes(opened[:3]) == b"old"


def test_readers_and_writers_at_once_see_whole_files(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.write("a", b"0" * 10_000)
    seen: set[bytes] = set()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.add(bytes(store.open("a")))

    def put(letter: bytes) -> None:
        for _ in range(30):
            LocalStore(tmp_path).write("a", letter * 10_000)

    reader = threading.Thread(target=look)
    writers = [threading.Thread(target=put, args=(letter,)) for letter in (b"0", b"1", b"2")]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert seen <= {letter * 10_000 for letter in (b"0", b"1", b"2")}
    assert temporaries(store) == []


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.write("a", b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Unavailable, match=r"cannot be written .No space left on device.*what is finished is kept"):
        store.write("a", b"new")
    assert bytes(store.open("a")) == b"old"
    assert temporaries(store) == []


def test_a_store_where_a_file_stands_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    store = LocalStore(tmp_path / "file")
    changes: list[Callable[[], None]] = [
        store.check,
        lambda: store.write("a", b"x"),
        lambda: store.delete("a"),
        lambda: store.move("a", "b"),
    ]
    for change in changes:
        with pytest.raises(Unavailable, match=r"cannot be written .(Not a directory|File exists)"):
            change()
    for call in (store.open, store.size):
        with pytest.raises(Unavailable, match=r"cannot be read .Not a directory"):
            call("a")


def test_sweeping_takes_what_the_dead_left_and_nothing_else(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    script = (
        "import os, signal, sys; from packhouse.client.store import LocalStore\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "LocalStore(sys.argv[1]).write('a/b', b'x' * 100)"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(temporaries(store)) == 1
    assert store.size("a/b") is None
    here = temporaries(store)[0].partition("~")[0]
    mine, others, abandoned = f"{here}~{os.getpid()}~ff", "elsewhere~1~ff", "elsewhere~2~ff"
    foreign = [".nfs0001", "x~y", "~~", f"{here}~me~1"]
    yesterday = time.time() - ABANDONED_SECONDS - 1
    for name in (mine, others, abandoned, *foreign):
        (tmp_path / TEMPORARY / name).write_text("x")
    for name in (abandoned, *foreign):
        os.utime(tmp_path / TEMPORARY / name, (yesterday, yesterday))
    assert store.sweep() == 2
    assert temporaries(store) == sorted([mine, others, *foreign])


def test_a_file_left_by_a_process_of_the_same_number_is_not_in_the_way(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    names = {store._temporary().name for _ in range(100)}
    assert len(names) == 100
    assert not names & {LocalStore(tmp_path)._temporary().name for _ in range(100)}


def test_a_store_travels_to_a_worker(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.write("a", b"x")
    assert bytes(pickle.loads(pickle.dumps(store)).open("a")) == b"x"
