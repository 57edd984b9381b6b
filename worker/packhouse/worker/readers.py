"""Readers: every kind of source as a stream of JSON lines, in parts that can be read on their own.

Only plain JSON lines are blocks of the file itself. Of all other kinds a block is a piece of what is unpacked here: of
the decompressed bytes, of a JSON array's elements, of a table's rows, of a text's documents, one record a line.
"""

import os
from collections.abc import Iterator
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from packhouse.client.errors import InvalidRequest
from packhouse.worker.json_array import BrokenArray, elements
from packhouse.worker.places import is_of_store, mapped, opened, read_range, size_of
from packhouse.worker.records import MAX_RECORD

MAX_GROWTH = 200
"""How many times a compressed source may grow when it is unpacked,"""
FREE_GROWTH = 256 << 20
"""once it has grown beyond so many bytes."""

_AT_ONCE = 1 << 20
_START, _PACKED_START = 64, 256 << 10
_CODECS = {"gz": "gzip", "zst": "zstd"}
_ZSTD = b"\x28\xb5\x2f\xfd"
_PACKED = {b"\x1f\x8b": "gz", _ZSTD: "zst"}
_SKIPPED = b"\x2a\x4d\x18"
"""Of a frame without data, which zstd files may begin with, as those of pzstd do; a byte 0x50 to 0x5f is before it."""
_UNREAD = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}
_ROWS = 1024
_BATCH_BYTES = 32 << 20


class SourceDamaged(InvalidRequest):
    """A source that is cut, corrupt or not what its name says; the message says where."""

    kind = "source-damaged"


def kind_of(path: str, documents: str = "file") -> str:
    """Return what kind of source a file is, by its first bytes and its name.

    That is ``lines``, ``array``, ``parquet``, ``arrow``, ``arrows`` (Arrow's stream format) or, for a .txt file,
    ``documents``; with ``gz+`` or ``zst+`` before it if it is compressed. Raises ``InvalidRequest`` for others.
    """
    start = read_range(path, 0, _START)
    if start[1:4] == _SKIPPED and start[0] >> 4 == 5:
        start = _ZSTD + start
    name = os.path.basename(path).lower()
    for magic, label in _UNREAD.items():
        if start.startswith(magic):
            raise InvalidRequest(f"the source {path!r} is a {label} file", "unpack it, or compress it by gzip or zstd")
    if start.startswith(b"PAR1"):
        return "parquet"
    if start.startswith(b"ARROW1"):
        return "arrow"
    packing = next((short for magic, short in _PACKED.items() if start.startswith(magic)), "")
    stem = name.removesuffix(".gz").removesuffix(".zst")
    if not packing and start and name.endswith((".gz", ".zst", ".parquet", ".feather")):
        raise InvalidRequest(f"the source {path!r} is not what its name says", "check the file, or rename it")
    if name.endswith((".arrow", ".feather")) and start:
        return "arrows"
    if stem.endswith(".txt"):
        inner = documents
    else:
        first = (_unpacked_start(path, packing) if packing else start).lstrip(b"\xef\xbb\xbf \t\r\n")
        inner = "array" if first.startswith(b"[") else "lines"
    return f"{packing}+{inner}" if packing else inner


def parts_of(path: str, how: str) -> int:
    """Return in how many parts a source can be read: row groups and record batches; else 1."""
    try:
        if how == "parquet":
            with mapped(path) as file:
                return int(pq.ParquetFile(file).num_row_groups)
        if how == "arrow":
            with mapped(path) as file:
                return int(pa.ipc.open_file(file).num_record_batches)
    except pa.ArrowException as error:
        raise damaged(path, str(error)) from None
    return 1


def unpack(path: str, how: str, part: int) -> Iterator[bytes]:
    """Yield a part of a source as JSON lines, in chunks of any length; raise ``SourceDamaged``."""
    packing, _, inner = how.rpartition("+")
    try:
        if inner in ("parquet", "arrow", "arrows"):
            yield from _tables(path, inner, part)
        elif inner == "array":
            yield from elements(_bytes(path, packing))
        elif inner == "file":
            yield _document(path, b"".join(_limited(path, _bytes(path, packing))))
        elif inner == "paragraph":
            yield from _paragraphs(path, _bytes(path, packing))
        else:
            yield from _bytes(path, packing)
    except (BrokenArray, pa.ArrowException, UnicodeDecodeError) as error:
        raise damaged(path, str(error)) from None
    except OSError as error:
        if error.errno or is_of_store(error):
            raise
        raise damaged(path, str(error)) from None  # the bytes came, and a codec could not read them


def damaged(path: str, reason: str) -> SourceDamaged:
    """Return the error that says a source cannot be used."""
    first = (reason.splitlines() or ["unreadable"])[0][:300]
    return SourceDamaged(f"the source {path!r} cannot be read to its end: {first}", "mend or fetch it again")


def _unpacked_start(path: str, packing: str) -> bytes:
    """Return the first bytes that a compressed source unpacks to."""
    start = pa.BufferReader(read_range(path, 0, _PACKED_START))
    try:
        return bytes(pa.CompressedInputStream(start, _CODECS[packing]).read(_START))
    except OSError as error:
        raise damaged(path, f"{error}, after 0 unpacked bytes") from None


def _bytes(path: str, packing: str) -> Iterator[bytes]:
    """Yield a file's bytes, decompressed: all members or frames, each checked to its end."""
    done = 0
    with opened(path) as raw:
        stream = pa.CompressedInputStream(raw, _CODECS[packing]) if packing else raw
        while True:
            try:
                chunk = stream.read(_AT_ONCE)
            except OSError as error:
                if not packing or is_of_store(error):
                    raise
                raise damaged(path, f"{error}, after {done:,} unpacked bytes") from None
            if not chunk:
                return
            done += len(chunk)
            if packing and done > FREE_GROWTH and done > MAX_GROWTH * size_of(path):
                reason = f"it grows to more than {MAX_GROWTH} times its size when unpacked"
                raise SourceDamaged(f"the source {path!r} is refused: {reason}", "unpack it first if it is sound")
            yield chunk


def _limited(path: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
    done = 0
    for chunk in chunks:
        done += len(chunk)
        if done > MAX_RECORD:
            remedy = "set documents to 'paragraph', or cut the file"
            raise SourceDamaged(f"the source {path!r} holds a document of more than {MAX_RECORD:,} bytes", remedy)
        yield chunk


def _document(path: str, data: bytes) -> bytes:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise damaged(path, f"byte {error.start} of a document is not UTF-8") from None
    return orjson.dumps({"text": text}) + b"\n" if text.strip() else b""


def _paragraphs(path: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield what stands between blank lines as documents."""
    kept: list[bytes] = []
    size = 0
    for found in _text_lines(path, chunks):
        line = found.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            kept.append(line)
            size += len(line)
            if size > MAX_RECORD:
                raise damaged(path, f"a paragraph of more than {MAX_RECORD:,} bytes")
        elif kept:
            yield _document(path, b"".join(kept).rstrip(b"\r\n"))
            kept, size = [], 0
    if kept:
        yield _document(path, b"".join(kept).rstrip(b"\r\n"))


def _text_lines(path: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
    open_end: list[bytes] = []
    for chunk in chunks:
        first, *rest = chunk.splitlines(keepends=True) if b"\r" not in chunk else _by_newline(chunk)
        open_end.append(first)
        if sum(map(len, open_end)) > MAX_RECORD:
            raise damaged(path, f"a line of more than {MAX_RECORD:,} bytes")
        if rest or first.endswith(b"\n"):
            yield b"".join(open_end)
            yield from rest[:-1]
            open_end = []
            if rest and rest[-1].endswith(b"\n"):
                yield rest[-1]
            elif rest:
                open_end = [rest[-1]]
    yield b"".join(open_end)


def _by_newline(chunk: bytes) -> list[bytes]:
    lines = [line + b"\n" for line in chunk.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return [line for line in lines if line] or [b""]


def _tables(path: str, how: str, part: int) -> Iterator[bytes]:
    """Yield the rows of a row group, a record batch or a stream of them."""
    with mapped(path) as file:
        if how == "parquet":
            table = pq.ParquetFile(file)
            group = table.metadata.row_group(part)
            # By bytes: a batch of nested columns cannot hold 2 GiB, and should hold far less.
            rows = min(_ROWS, max(1, _BATCH_BYTES * group.num_rows // max(1, group.total_byte_size)))
            batches = table.iter_batches(rows, row_groups=[part])
        else:
            batches = [pa.ipc.open_file(file).get_batch(part)] if how == "arrow" else pa.ipc.open_stream(file)
        for batch in batches:
            if len(set(batch.schema.names)) < batch.num_columns:
                raise damaged(path, "two of its columns have the same name")
            for start in range(0, batch.num_rows, _ROWS):
                yield _rows(batch.slice(start, _ROWS))


def _rows(batch: pa.RecordBatch) -> bytes:
    """Return the rows as JSON lines, with all columns: what a block is must not depend on which of them a job reads."""
    return b"".join(orjson.dumps(_given(row), default=_other) + b"\n" for row in batch.to_pylist())


def _given(value: Any) -> Any:
    """Leave out the fields that are null: a table gives each of its objects the fields of all others."""
    if isinstance(value, dict):
        return {name: _given(item) for name, item in value.items() if item is not None}
    return [_given(item) for item in value] if isinstance(value, list | tuple) else value


def _other(value: Any) -> str | None:
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None
