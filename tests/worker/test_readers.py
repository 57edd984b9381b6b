"""Readers: every kind of source gives the same records, and a damaged one fails with its name and place."""

import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worker.kinds import KINDS, LINES, ROWS, records, write, zstd

from packhouse.client.errors import InvalidRequest
from packhouse.worker import cutting, readers, unpacked
from packhouse.worker.json_array import BrokenArray, elements
from packhouse.worker.readers import SourceDamaged, kind_of, unpack
from packhouse.worker.sources import Fingerprint, expand, scan
from packhouse.worker.unpacked import first_records


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "NARROWEST", 10_000)
    monkeypatch.setattr(cutting, "WIDEST", 20_000)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", KINDS)
def test_b038_every_kind_of_source_gives_the_same_records(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"a.{kind}", kind)
    assert expand([str(tmp_path)]) == [str(path)]
    blocks = scan(str(path))
    assert len(blocks) > 2
    assert records(blocks) == ROWS
    assert [block.first_line for block in blocks] == [sum(one.lines for one in blocks[:n]) for n in range(len(blocks))]
    assert records(blocks[::-1]) == [row for block in blocks[::-1] for row in records([block])], "in any order"
    assert first_records([str(path)])[:5] == ROWS[:5]


@pytest.mark.usefixtures("small")
def test_blocks_of_what_is_unpacked_are_those_of_the_plain_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    plain = [block.digest for block in scan(str(tmp_path / "a.jsonl"))]
    for kind in ("jsonl.gz", "jsonl.zst"):
        assert [block.digest for block in scan(str(write(tmp_path / kind, kind)))] == plain


@pytest.mark.usefixtures("small")
def test_blocks_read_in_order_unpack_a_source_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = scan(str(write(tmp_path / "a.jsonl.gz", "jsonl.gz")))
    opened: list[Any] = []

    def unpack(*key: Any) -> Any:
        opened.append(key)
        return readers.unpack(*key)

    monkeypatch.setattr("packhouse.worker.sources.unpack", unpack)
    assert records(blocks[1::2])
    assert len(opened) == 1, "what lies between is passed over"
    assert records(blocks[:1])
    assert len(opened) == 2


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "json", "json.gz", "parquet", "feather"])
def test_b038_a_cut_source_fails_with_its_name(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"a.{kind}", kind)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 20])
    with pytest.raises(SourceDamaged, match=rf"a\.{kind}.*cannot be read to its end"):
        scan(str(path))


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst"])
def test_a_corrupt_source_fails_and_gives_no_wrong_record(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"a.{kind}", kind)
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 3] ^= 0x55
    path.write_bytes(whole)
    with pytest.raises(SourceDamaged, match=r"after [0-9,]+ unpacked bytes"):
        scan(str(path))


def test_a_table_that_cannot_be_read_fails_with_its_name(tmp_path: Path) -> None:
    texts = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe"))
    pq.write_table(pa.table({"text": texts}), tmp_path / "no_utf8.parquet")
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    pq.write_table(pa.table({"text": [f"{row:050}" for row in range(20_000)]}), tmp_path / "corrupt.parquet")
    data = bytearray((tmp_path / "corrupt.parquet").read_bytes())
    data[5000:5400] = bytes(byte ^ 0x5A for byte in data[5000:5400])
    (tmp_path / "corrupt.parquet").write_bytes(data)
    for name, reason in (("no_utf8", "can't decode"), ("twice", "the same name"), ("corrupt", "Corrupt snappy")):
        path = str(tmp_path / f"{name}.parquet")
        for look in (scan, lambda path: first_records([path])):
            with pytest.raises(SourceDamaged, match=rf"{name}\.parquet.*{reason}"):
                look(path)


def test_a_frame_without_data_may_come_first(tmp_path: Path) -> None:
    """As pzstd writes it."""
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + zstd(b'{"text": "a"}\n'))
    assert records(scan(str(path))) == first_records([str(path)]) == [{"text": "a"}]


def test_the_cases_of_the_log(shared: Path) -> None:
    inputs = shared / "cases" / "inputs"
    assert len(records(scan(str(inputs / "B038.jsonl.gz")))) == 2
    with pytest.raises(SourceDamaged, match=r"B038_trunc\.jsonl\.gz"):
        scan(str(inputs / "B038_trunc.jsonl.gz"))


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_a_bomb_is_refused(pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "FREE_GROWTH", 1 << 20)
    (tmp_path / "a.jsonl.gz").write_bytes(pack(b"\n" * (64 << 20)))
    with pytest.raises(SourceDamaged, match="more than 200 times its size"):
        scan(str(tmp_path / "a.jsonl.gz"))


def test_a_line_without_an_end_is_not_read_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "NARROWEST", 5_000)
    monkeypatch.setattr(cutting, "READ_AT_ONCE", 4_096)
    monkeypatch.setattr(cutting, "MAX_LINE", 50_000)
    (tmp_path / "a.jsonl").write_bytes(b"{}\n" + b"x" * 200_000)
    with pytest.raises(SourceDamaged, match="no line ends within 50,000 bytes"):
        scan(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("documents", "texts"),
    [("file", ["\r\none\r\ntwo\n\n \n\nthree"]), ("paragraph", ["one\r\ntwo", "three"])],
)
@pytest.mark.parametrize("at_once", [1, 3, 1 << 20])
def test_a_text_is_one_document_or_one_a_paragraph(
    documents: str, texts: list[str], at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf\r\none\r\ntwo\n\n \n\nthree")
    monkeypatch.setattr(readers, "_AT_ONCE", at_once)
    monkeypatch.setattr(readers._bytes, "__defaults__", (at_once,))
    assert [record["text"] for record in records(scan(str(path), documents))] == texts
    assert Fingerprint.of(str(path), "file").key != Fingerprint.of(str(path), "paragraph").key


def test_a_text_that_is_no_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    with pytest.raises(SourceDamaged, match="byte 3 of a document is not UTF-8"):
        scan(str(tmp_path / "a.txt"))
    monkeypatch.setattr(readers, "MAX_RECORD", 3)
    with pytest.raises(SourceDamaged, match="set documents to 'paragraph'"):
        scan(str(tmp_path / "a.txt"))


@settings(max_examples=60)
@given(
    st.lists(st.recursive(st.none() | st.integers() | st.text() | st.floats(allow_nan=False), st.lists), max_size=6),
    st.sampled_from([None, 2]),
    st.integers(1, 40),
)
def test_elements_are_those_of_the_array(values: list[Any], indent: int | None, at_once: int) -> None:
    data = b" \r\n" + json.dumps(values, indent=indent, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
    chunks = (data[place : place + at_once] for place in range(0, len(data), at_once))
    lines = list(elements(chunks))
    assert [json.loads(line.decode("utf-8", "surrogatepass")) for line in lines] == values
    assert all(line.count(b"\n") == 1 for line in lines)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"[1, 2", "at its element 2"),
        (b'[1, {"a": ', "at its element 2"),
        (b"[1 2]", "behind its element 1"),
        (b"[1,]", "at its element 2"),
        (b"[1] 2", "something follows the array of 1"),
        (b"[" + b"[" * 100_000, "nested too deeply"),
        (b"{}", "not a JSON array"),
        (b"[1, {'a': 1}, " + b"2, " * 9 + b"3]", "broken at its element 2"),
        (b"[" + b"1" * 5000 + b"]", "too many digits"),
    ],
)
def test_a_broken_array_says_where(data: bytes, match: str) -> None:
    with pytest.raises(BrokenArray, match=match):
        list(elements(iter([data])))


def test_what_is_broken_at_once_is_not_read_to_its_end() -> None:
    read = []

    def chunks() -> Iterator[bytes]:
        for number in range(1000):
            read.append(number)
            yield b"[{'text': 'a'}, " if not number else b"{'text': 'a'}, " * 100

    with pytest.raises(BrokenArray, match="broken at its element 1"):
        list(elements(chunks()))
    assert len(read) < 5


def test_an_element_without_an_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packhouse.worker.json_array.MAX_LINE", 10_000)
    with pytest.raises(BrokenArray, match="element 1 has no end within 10,000"):
        list(elements(itertools.chain([b'["'], itertools.repeat(b"a" * 1000))))


def test_b042_wide_rows_of_a_nested_column_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    """1,024 rows of 2 MiB are more than a batch of a nested column can hold: what fits is by bytes."""
    path, width = tmp_path / "wide.parquet", 1 << 20
    row = [{"role": "user", "content": "q" * width}]
    pq.write_table(pa.table({"messages": [row] * 80}), path, row_group_size=80, use_dictionary=False)
    pieces = list(unpack(str(path), "parquet", 0))
    assert b"".join(pieces).count(b"\n") == 80
    assert max(map(len, pieces)) < 40 * width


def test_rows_of_a_table_have_no_fields_of_other_rows(tmp_path: Path) -> None:
    """B015: a table unifies the arguments of tool calls; what a row never had does not come back as null."""
    rows: list[dict[str, Any]] = [{"m": [{"a": {"city": "X"}}], "t": None}, {"m": [{"a": {"n": 3}}], "t": "2025-08-01"}]
    pairs = pa.array([[("k", {"a": None, "b": 1})]], pa.map_(pa.string(), pa.struct({"a": pa.int8(), "b": pa.int8()})))
    pq.write_table(pa.table({"m": pairs}), tmp_path / "map.parquet")
    assert records(scan(str(tmp_path / "map.parquet"))) == [{"m": [["k", {"b": 1}]]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert records(scan(str(tmp_path / "a.parquet"))) == [{"m": [{"a": {"city": "X"}}]}, rows[1]]


def test_kinds_are_told_by_content_first(tmp_path: Path) -> None:
    for name, data, kind in (
        ("a.jsonl", gzip.compress(b"{}\n"), "gz+lines"),
        ("a.txt.zst", zstd(b"x"), "zst+file"),
        ("a.json", b"\xef\xbb\xbf [1]", "array"),
        ("a.jsonl.gz", b"", "lines"),
        ("a.txt", b"[x", "file"),
    ):
        (tmp_path / name).write_bytes(data)
        assert kind_of(str(tmp_path / name)) == kind
    (tmp_path / "a.xz").write_bytes(b"\xfd7zXZ\x00")
    with pytest.raises(InvalidRequest, match="xz file: unpack it"):
        kind_of(str(tmp_path / "a.xz"))


def test_the_first_records_are_those_of_the_first_file_with_any(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    (tmp_path / "b.jsonl").write_bytes(b'not json\n\xef\xbb\xbf{"text": "a"}\n[1]\n{"text": "b"}')
    names = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    assert first_records(names) == [{"text": "a"}, {"text": "b"}]
    assert first_records(names[:1]) == []
    assert len(unpacked.first_records(names, count=2)) == 1


def test_a_first_record_may_be_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacked, "_SAMPLE", 1000)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a" * 200_000}) + '\n{"text": "b"}\n')
    assert [len(record["text"]) for record in first_records([str(tmp_path / "a.jsonl")])] == [200_000, 1]
