"""Sources and blocks: which files a job reads, and where content says to cut them.

A block ends at the first line, past a minimum size, whose hash meets a condition; a maximum size caps it. So an
appended tail changes only the last block, and an insertion only its neighbourhood. Sources that are not plain JSON
lines are cut as what ``readers`` unpacks; a worker that reads their blocks in order unpacks each source once.
"""

import glob
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
import xxhash

from packhouse.client.digest import digest_bytes
from packhouse.client.errors import InvalidRequest, PackhouseError
from packhouse.worker.readers import damaged, kind_of, parts_of, unpack
from packhouse.worker.unpacked import Unpacked, open_part

MIN_BLOCK = 16 << 20
"""Bytes before which a block does not end, unless its source does."""
MAX_BLOCK = 32 << 20
"""Bytes after which a block ends at the next line end, whatever the content."""
MEAN_TAIL = 4 << 20
"""Bytes past the minimum at which content ends a block, on average."""

MAX_LINE = 1 << 30
"""Bytes after which a line without an end is taken for something else than JSON lines."""

_LINES = (".jsonl", ".ndjson", ".json")
_SUFFIXES = (*_LINES, *(one + packed for one in _LINES for packed in (".gz", ".zst")), ".parquet", ".arrow", ".feather")
_READ_AT_ONCE = 4 << 20


class SourceChanged(PackhouseError):
    """A source is not, or is no longer, what it was when the job looked at it first."""

    kind = "source-changed"
    status = 409


@dataclass(frozen=True, slots=True)
class Block:
    """A line-aligned piece of a source."""

    source: str
    offset: int
    """Bytes from the start of the source."""
    length: int
    """Bytes."""
    first_line: int
    """Number of the block's first line in the source, from 0, blank lines included."""
    lines: int
    """Lines of the block, blank ones included."""
    digest: str
    """xxh3-128 of its bytes."""
    how: str = "lines"
    """Kind of the source; of all but lines, offset and length count in what the part is unpacked to."""
    part: int = 0
    """Row group or record batch."""

    def __str__(self) -> str:
        return f"{self.source!r}, lines {self.first_line + 1} to {self.first_line + self.lines}"


def expand(sources: list[str]) -> list[str]:
    """Return the files that ``sources`` (files, folders, globs) name, in order; folders and globs sort by bytes.

    No data is read beyond the first bytes of each file. Raises ``InvalidRequest`` for a relative path, for one that
    names nothing, and for a file that cannot be read or is of a kind that is not known.
    """
    files: list[str] = []
    for source in sources:
        if not os.path.isabs(source):
            raise InvalidRequest(f"the source {source!r} is a relative path", "give an absolute one")
        files.extend(_expand_one(source))
    for file in files:
        _check_readable(file)
    return files


def _expand_one(source: str) -> list[str]:
    if os.path.isdir(source):
        found = [str(path) for path in Path(source).rglob("*") if path.name.endswith(_SUFFIXES) and path.is_file()]
        remedy = "name the files, or give them one of the suffixes " + ", ".join(_SUFFIXES)
    elif os.path.exists(source) or not glob.has_magic(source):
        return [source]
    else:
        found = [path for path in glob.glob(source, recursive=True) if os.path.isfile(path)]
        remedy = "check the pattern"
    if not found:
        raise InvalidRequest(f"the source {source!r} matches no file of records", remedy)
    return sorted(found, key=os.fsencode)


def _check_readable(file: str) -> None:
    try:
        file.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"the name of the source {file!r} is not UTF-8", "rename it") from None
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):  # before it is opened: opening a pipe would wait for a writer
            raise InvalidRequest(f"the source {file!r} is not a regular file", "name a file, a folder or a glob")
        kind_of(file)
    except OSError as error:
        raise InvalidRequest(f"the source {file!r} cannot be read ({error.strerror})", "check the path") from None


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tells that a local file has not changed, without reading it."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    documents: str = "file"
    """How a .txt file is cut into documents."""

    def __str__(self) -> str:
        return repr(self.path)

    @classmethod
    def of(cls, path: str, documents: str = "file") -> Self:
        """Stat ``path``; raise ``SourceChanged`` if it has gone."""
        try:
            info = os.stat(path)
        except OSError as error:
            raise _unreadable(path, error) from None
        return cls(path, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino, documents)

    @property
    def key(self) -> str:
        """Name of the remembered block list."""
        how = "" if self.documents == "file" else f":{self.documents}"
        return f"blocks:{self.path}:{self.size}:{self.mtime_ns}:{self.ctime_ns}:{self.inode}{how}"

    def settled(self, now_ns: int | None = None) -> bool:
        """Whether a later write would surely show in the times: False for a file younger than its clock's grain."""
        newest = max(self.mtime_ns, self.ctime_ns)
        # A file system that keeps whole seconds leaves no other digits; every other one ticks within 10 ms.
        grain_ns = 2_000_000_000 if self.ctime_ns % 1_000_000_000 == 0 else 100_000_000
        return (time.time_ns() if now_ns is None else now_ns) - newest > grain_ns


def scan(path: str, documents: str = "file") -> list[Block]:
    """Read ``path`` once and return its blocks, in order; none for an empty file. Holds one block in memory.

    Raises ``SourceChanged`` when it cannot be read, and ``SourceDamaged`` when it is cut or corrupt.
    """
    blocks: list[Block] = []
    line = 0
    try:
        how = kind_of(path, documents)
        for part in range(parts_of(path, how)):
            offset = 0
            with open_part(path, how, part) as file:
                for data in cut(file):
                    count = _lines(data)
                    blocks.append(Block(path, offset, len(data), line, count, digest_bytes(data), how, part))
                    offset += len(data)
                    line += count
    except _NoLineEnd:
        raise damaged(path, f"no line ends within {MAX_LINE:,} bytes behind line {line}") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    return blocks


class _NoLineEnd(Exception):
    pass


def _unreadable(path: str, error: OSError) -> SourceChanged:
    detail = f"the source {path!r} cannot be read any more ({error.strerror})"
    return SourceChanged(detail, "put it back, or submit the job again")


def _lines(data: memoryview) -> int:
    bytes_ = np.frombuffer(data, np.uint8)
    return int(np.count_nonzero(bytes_ == ord("\n"))) + (data[-1] != ord("\n"))


def cut(file: BinaryIO) -> Iterator[memoryview]:
    """Yield the bytes of ``file`` block by block; each view is good until the next is asked for."""
    buffer = bytearray(MAX_BLOCK + _READ_AT_ONCE)
    filled = 0
    ended = False
    while True:
        while filled < MAX_BLOCK and not ended:
            filled, ended = _fill(file, buffer, filled)
        if not filled:
            return
        end = _block_end(buffer, filled)
        while end is None and not ended:  # one line longer than a block: the block ends where the line does
            searched = filled
            if filled > MAX_LINE:
                raise _NoLineEnd
            filled, ended = _fill(file, buffer, filled)
            end = buffer.find(b"\n", searched, filled) + 1 or None
        end = filled if end is None else end
        with memoryview(buffer) as view, view[:end] as block:
            yield block
            view[: filled - end] = view[end:filled]
        filled -= end


def _fill(file: BinaryIO, buffer: bytearray, filled: int) -> tuple[int, bool]:
    """Read some bytes behind the first ``filled`` of ``buffer``; return how many there are and whether that is all."""
    if filled == len(buffer):
        buffer.extend(bytes(len(buffer)))
    with memoryview(buffer) as view:
        count = file.readinto(view[filled : filled + _READ_AT_ONCE])  # type: ignore[attr-defined]
    return filled + count, not count


def _block_end(buffer: bytearray, filled: int) -> int | None:
    """Return where the first block of ``buffer[:filled]`` ends, or None if it has no line end past the minimum.

    A line ends its block with a probability in proportion to its length, so that the mean tail is the same for short
    and for long lines.
    """
    start = buffer.find(b"\n", MIN_BLOCK - 1, filled) + 1
    if start == 0:
        return None
    with memoryview(buffer) as view:
        while (newline := buffer.find(b"\n", start, min(MAX_BLOCK, filled))) >= 0:
            end = newline + 1
            if xxhash.xxh3_64_intdigest(view[start:end]) < ((end - start) << 64) // MEAN_TAIL:
                return end
            start = end
    return start if filled >= MAX_BLOCK else None


def read(block: Block) -> bytes:
    """Return the bytes of a block; raise ``SourceChanged`` if they are not those that were scanned."""
    try:
        if block.how == "lines":
            with open(block.source, "rb") as file:
                file.seek(block.offset)
                data = file.read(block.length)
        else:
            data = _read_on(block)
    except OSError as error:
        raise _unreadable(block.source, error) from None
    if len(data) != block.length or digest_bytes(data) != block.digest:
        _LAST.clear()
        raise SourceChanged(f"the source {block.source!r} changed while the job ran", "submit the job again")
    return data


_LAST: dict[tuple[str, str, int], Unpacked] = {}
"""The part that this process read last, and how far: the next block of it is further on."""


def _read_on(block: Block) -> bytes:
    key = (Fingerprint.of(block.source).key, block.how, block.part)
    file = _LAST.pop(key, None)
    _LAST.clear()
    if file is None or file.place > block.offset:
        file = Unpacked(unpack(block.source, block.how, block.part))
    buffer = bytearray(_READ_AT_ONCE)
    while file.place < block.offset and file.readinto(memoryview(buffer)[: block.offset - file.place]):
        pass
    data = bytearray(block.length)
    with memoryview(data) as view:
        done = 0
        while done < block.length and (count := file.readinto(view[done:])):
            done += count
    _LAST[key] = file
    return bytes(data[:done])
