"""Sources and blocks: which files, where they are cut, and when a change is seen."""

import os
import random
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhouse.client.errors import InvalidRequest
from packhouse.worker import sources
from packhouse.worker.sources import Block, Fingerprint, SourceChanged, expand, read, scan


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MIN_BLOCK", 20_000)
    monkeypatch.setattr(sources, "MAX_BLOCK", 60_000)
    monkeypatch.setattr(sources, "MEAN_TAIL", 5_000)
    monkeypatch.setattr(sources, "_READ_AT_ONCE", 4_096)


def some_lines(count: int, seed: int = 0) -> list[bytes]:
    draw = random.Random(seed)
    return [b'{"text":"%d"}\n' % draw.getrandbits(draw.randint(1, 300)) for _ in range(count)]


def scan_bytes(path: Path, data: bytes) -> list[Block]:
    path.write_bytes(data)
    return scan(str(path))


@pytest.mark.usefixtures("small")
def test_blocks_are_the_file_cut_at_line_ends_between_the_sizes(tmp_path: Path) -> None:
    data = b"".join(some_lines(8_000))
    blocks = scan_bytes(tmp_path / "a", data)
    assert len(blocks) > 10
    assert b"".join(read(block) for block in blocks) == data
    assert all(read(block).endswith(b"\n") for block in blocks)
    assert all(20_000 <= block.length <= 60_000 for block in blocks[:-1])
    assert len({block.length for block in blocks}) > 5, "content decides, not a fixed size"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("digits", [20, 200, 2_000])
def test_short_and_long_lines_make_blocks_of_one_mean_size(tmp_path: Path, digits: int) -> None:
    draw = random.Random(digits)
    lines = [b"%0*d\n" % (digits, draw.getrandbits(60)) for _ in range(4_000_000 // digits)]
    blocks = scan_bytes(tmp_path / "a", b"".join(lines))
    tails = [block.length - sources.MIN_BLOCK for block in blocks[:-1]]
    assert 0.8 < sum(tails) / len(tails) / sources.MEAN_TAIL < 1.4


@pytest.mark.usefixtures("small")
def test_lines_are_counted_over_blocks(tmp_path: Path) -> None:
    data = b"\n\n".join(some_lines(4_000)) + b"last"
    blocks = scan_bytes(tmp_path / "a", data)
    assert [block.first_line for block in blocks] == [data[: block.offset].count(b"\n") for block in blocks]
    assert blocks[-1].first_line + blocks[-1].lines == data.count(b"\n") + 1


def test_any_bytes_come_back_whole(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("any") / "a"

    @given(st.lists(st.binary(max_size=120), max_size=40), st.booleans(), st.integers(1, 97))
    def check(parts: list[bytes], ended: bool, at_once: int) -> None:
        # It starts as a record does: what starts otherwise may be taken for an array or a packed file.
        data = b"{" + b"\n".join(parts) + (b"\n" if ended else b"")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {"MIN_BLOCK": 50, "MAX_BLOCK": 150, "MEAN_TAIL": 30, "_READ_AT_ONCE": at_once}.items():
                patch.setattr(sources, name, value)
            blocks = scan_bytes(path, data)
        assert b"".join(read(block) for block in blocks) == data
        assert all(data[block.offset + block.length - 1] == 10 for block in blocks[:-1])
        assert all(block.length >= 50 for block in blocks[:-1])

    check()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("at_once", [1_000, 4_096, 1 << 20])
def test_cuts_do_not_depend_on_how_the_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    lines = some_lines(2_000)
    data = b"".join([*lines[:900], b"x" * 130_000, b"\n", *lines[900:]])
    expected = scan_bytes(tmp_path / "a", data)
    monkeypatch.setattr(sources, "_READ_AT_ONCE", at_once)
    assert scan(str(tmp_path / "a")) == expected


@pytest.mark.usefixtures("small")
def test_a_line_longer_than_a_block_is_not_cut(tmp_path: Path) -> None:
    huge = b'{"text":"' + b"x" * 300_000 + b'"}\n'
    blocks = scan_bytes(tmp_path / "a", b"".join([*some_lines(300), huge, *some_lines(300)]))
    assert [huge in read(block) for block in blocks].count(True) == 1


@pytest.mark.parametrize(("data", "count"), [(b"", 0), (b"\n", 1), (b"a", 1), (b"a\n", 1)])
def test_small_files(tmp_path: Path, data: bytes, count: int) -> None:
    blocks = scan_bytes(tmp_path / "a", data)
    assert len(blocks) == count
    assert all((block.offset, block.first_line, block.lines) == (0, 0, 1) for block in blocks)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("last", [b"", b"no line end"])
def test_an_append_changes_only_the_last_block(tmp_path: Path, last: bytes) -> None:
    data = b"".join(some_lines(6_000)) + last
    before = scan_bytes(tmp_path / "a", data)
    after = scan_bytes(tmp_path / "a", data + b"".join(some_lines(300, seed=1)))
    assert after[: len(before) - 1] == before[:-1]


@pytest.mark.usefixtures("small")
def test_an_insertion_or_deletion_changes_at_most_two_blocks(tmp_path: Path) -> None:
    lines = some_lines(12_000)
    before = {block.digest for block in scan_bytes(tmp_path / "a", b"".join(lines))}
    assert len(before) > 15
    for place in range(500, 11_500, 700):
        for edited in ([*lines[:place], b"{}\n", *lines[place:]], lines[:place] + lines[place + 1 :]):
            after = scan_bytes(tmp_path / "a", b"".join(edited))
            assert len([block for block in after if block.digest not in before]) <= 2


@pytest.mark.usefixtures("small")
def test_the_same_bytes_at_another_path_are_the_same_blocks(tmp_path: Path) -> None:
    data = b"".join(some_lines(3_000))
    left, right = scan_bytes(tmp_path / "a", data), scan_bytes(tmp_path / "b", data)
    assert [block.digest for block in left] == [block.digest for block in right]


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


def test_the_default_sizes_are_those_that_are_promised() -> None:
    assert (sources.MIN_BLOCK, sources.MAX_BLOCK) == (16 << 20, 32 << 20)
    sizes = [sources.MIN_BLOCK, sources.MIN_BLOCK + 4 * sources.MEAN_TAIL, sources.MAX_BLOCK]
    assert all(a <= b for a, b in pairwise(sizes)), "few blocks reach the maximum, where content no longer decides"
