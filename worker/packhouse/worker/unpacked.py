"""What a reader unpacks, as a file; and the first records of a job's sources."""

import io
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, cast

import orjson

from packhouse.worker.places import is_object, opened, trouble
from packhouse.worker.readers import kind_of, parts_of, unpack
from packhouse.worker.records import MAX_RECORD


def open_part(path: str, how: str, part: int) -> BinaryIO:
    """Open a part of a source as JSON lines."""
    return cast(BinaryIO, opened(path) if how == "lines" else Unpacked(unpack(path, how, part)))


class Unpacked(io.RawIOBase):
    """What a reader unpacks, as a file that can be read from its start to its end."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._chunk = memoryview(b"")
        self.place = 0

    def readable(self) -> bool:
        """Whether it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill some of ``buffer``; return how many bytes, 0 at the end."""
        while not self._chunk:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._chunk = memoryview(chunk)
        count = min(len(buffer), len(self._chunk))
        buffer[:count] = self._chunk[:count]
        self._chunk = self._chunk[count:]
        self.place += count
        return count


def first_records(files: Sequence[str], documents: str = "file", count: int = 20) -> list[dict[str, Any]]:
    """Return the first records of the first file that has any: those, of so many lines, that are JSON objects."""
    for path in files:
        lines = first_lines(path, documents, count)
        if found := [record for line in lines if (record := _object(line)) is not None]:
            return found
    return []


def first_lines(path: str, documents: str = "file", count: int = 20) -> list[bytes]:
    """Return the first lines of a source, at most ``count`` and some 8 MiB of them, but one at least."""
    try:
        return _first_lines(path, documents, count)
    except OSError as error:
        if is_object(path):
            raise trouble(path, error) from None
        raise


def _first_lines(path: str, documents: str, count: int) -> list[bytes]:
    how = kind_of(path, documents)
    if not parts_of(path, how):
        return []
    data = bytearray()
    ended = False
    found = 0
    with open_part(path, how, 0) as file:
        while not ended and found < count and (len(data) < _SAMPLE or not found) and len(data) <= MAX_RECORD:
            chunk = file.read(1 << 16)
            ended = not chunk
            found += chunk.count(b"\n")
            data += chunk
    lines = bytes(data).split(b"\n")
    return (lines if ended else lines[:-1])[:count]


_SAMPLE = 8 << 20


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        record = orjson.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None
