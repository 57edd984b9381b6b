"""Sources and blocks: which files, where they are cut, and when a change is seen."""

import os
import time
from pathlib import Path

import pytest

from packhouse.client.errors import InvalidRequest
from packhouse.worker.sources import Block, Fingerprint, SourceChanged, expand, read, scan


def scan_bytes(path: Path, data: bytes) -> list[Block]:
    path.write_bytes(data)
    return scan(str(path))


@pytest.mark.parametrize(("data", "count"), [(b"", 0), (b"\n", 1), (b"a", 1), (b"a\n", 1)])
def test_small_files(tmp_path: Path, data: bytes, count: int) -> None:
    blocks = scan_bytes(tmp_path / "a", data)
    assert len(blocks) == count
    assert all((block.offset, block.first_line, block.lines) == (0, 0, 1) for block in blocks)


@pytest.mark.parametrize("change", [b"y", b"xx", b""])
def test_a_source_that_changed_is_not_read(tmp_path: Path, change: bytes) -> None:
    (block,) = scan_bytes(tmp_path / "a", b"x\n")
    (tmp_path / "a").write_bytes(change + b"\n" if change else b"")
    if change == b"xx":  # what was scanned is still there
        (tmp_path / "a").write_bytes(b"x\nmore\n")
        assert read(block) == b"x\n"
        return
    with pytest.raises(SourceChanged, match="changed while the job ran"):
        read(block)


def test_a_source_that_is_gone_is_told(tmp_path: Path) -> None:
    (block,) = scan_bytes(tmp_path / "a", b"x\n")
    (tmp_path / "a").unlink()
    for call in (lambda: read(block), lambda: scan(block.source), lambda: Fingerprint.of(block.source)):
        with pytest.raises(SourceChanged, match="No such file"):
            call()


@pytest.mark.parametrize("order", [("A10", "a", "b"), ("b", "a", "A10")])
def test_folders_and_globs_sort_by_bytes(tmp_path: Path, order: tuple[str, ...]) -> None:
    for name in order:
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    (tmp_path / "notes.txt").write_text("not data")
    expected = [str(tmp_path / f"{name}.jsonl") for name in ("A10", "a", "b")]
    assert expand([str(tmp_path)]) == expected
    assert expand([f"{tmp_path}/*.jsonl"]) == expected
    assert expand([expected[2], expected[0]]) == [expected[2], expected[0]], "named files keep their order"


def test_folders_are_searched_to_the_bottom_and_names_with_brackets_are_names(tmp_path: Path) -> None:
    (tmp_path / "x" / "y").mkdir(parents=True)
    deep, odd = tmp_path / "x" / "y" / "d.ndjson", tmp_path / "o[1].jsonl"
    deep.write_text("{}\n")
    odd.write_text("{}\n")
    assert expand([str(tmp_path)]) == [str(odd), str(deep)]
    assert expand([str(odd)]) == [str(odd)]
    assert expand([f"{tmp_path}/**/*.ndjson"]) == [str(deep)]


def test_a_glob_names_each_file_once_and_is_no_way_to_keep_the_service_busy(tmp_path: Path) -> None:
    folder = tmp_path.joinpath(*"abcdefghijklmnop")
    folder.mkdir(parents=True)
    (folder / "x.jsonl").write_text("{}\n")
    assert expand([f"{tmp_path}/**/p/**/*.jsonl"]) == [str(folder / "x.jsonl")]
    assert expand([f"{tmp_path}/**/**/*.jsonl"]) == [str(folder / "x.jsonl")]
    for place in (str(tmp_path), "s3://bucket/data"):
        with pytest.raises(InvalidRequest, match=r"'\*\*' more than twice"):
            expand([place + "/**" * 12 + "/*.jsonl"])


@pytest.mark.parametrize(
    ("name", "data", "match"),
    [
        ("a.jsonl.gz", b"x", "not what its name says"),
        ("a.PARQUET", b"x", "not what its name says"),
        ("a.jsonl", b"\x1f\x8b\x08rest", "cannot be read to its end"),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfdrest", "cannot be read to its end"),
        ("a.jsonl", b"BZh91AY", "is a bzip2 file"),
        ("a.zip", b"PK\x03\x04", "is a zip file"),
    ],
)
def test_other_kinds_of_files_are_refused(tmp_path: Path, name: str, data: bytes, match: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InvalidRequest, match=match):
        expand([str(tmp_path / name)])


@pytest.mark.parametrize("source", ["a.jsonl", "./a.jsonl", ""])
def test_relative_paths_are_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match="relative path: give an absolute one"):
        expand([source])


def test_addresses_of_other_kinds_are_refused_and_not_shown() -> None:
    with pytest.raises(InvalidRequest, match="begins with 'https', which is not read") as refusal:
        expand(["https://host/a.jsonl?key=hunter2"])
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize("name", ["missing.jsonl", "empty", "empty/*.jsonl", "loop.jsonl"])
def test_what_names_nothing_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    with pytest.raises(InvalidRequest, match=r"cannot be read|matches no file of records"):
        expand([str(tmp_path / name)])


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(InvalidRequest, match="not a regular file"):
        expand([str(tmp_path / "a.jsonl")])
    with pytest.raises(InvalidRequest, match="not a regular file"):
        expand(["/dev/null"])


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.jsonl")).write_text("{}\n")
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        expand([str(tmp_path)])


def test_an_edit_that_keeps_size_and_mtime_changes_the_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("aaaa")
    before, info = Fingerprint.of(str(path)), path.stat()
    while time.time_ns() - info.st_ctime_ns < 20_000_000:  # the clock's grain
        pass
    path.write_text("bbbb")
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    after = Fingerprint.of(str(path))
    assert (after.size, after.mtime_ns, after.inode) == (before.size, before.mtime_ns, before.inode)
    assert after.key != before.key


@pytest.mark.parametrize(
    ("mtime", "ctime", "age", "settled"),
    [
        (5, 5, 50_000_000, False),
        (5, 5, 150_000_000, True),
        (400_000_005, 5, 450_000_000, False),  # the newest of the two counts
        (0, 0, 1_900_000_000, False),  # a file system that keeps whole seconds
        (0, 0, 2_100_000_000, True),
        (10**18 + 5, 5, 10**10, False),  # a time in the future is not trusted
    ],
)
def test_a_fresh_file_is_not_settled(mtime: int, ctime: int, age: int, settled: bool) -> None:
    assert Fingerprint("/a", 1, mtime, ctime, 1).settled(age) is settled
