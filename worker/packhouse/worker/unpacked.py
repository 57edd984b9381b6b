"""What a reader unpacks, as a file; and the first records of a job's sources."""

import io
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, cast

import orjson

from packhouse.worker.readers import kind_of, parts_of, unpack


def open_part(path: str, how: str, part: int) -> BinaryIO:
    """Open a part of a source as JSON lines."""
    return open(path, "rb", buffering=0) if how == "lines" else cast(BinaryIO, Unpacked(unpack(path, how, part)))


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
        with open_part(path, kind := kind_of(path, documents), 0) as file:
            if kind == "parquet" and not parts_of(path, kind):
                continue
            data = bytearray()
            while len(data) < _SAMPLE and data.count(b"\n") < count and (chunk := file.read(1 << 16)):
                data += chunk
        found = [record for line in data.split(b"\n")[:count] if (record := _object(line)) is not None]
        if found:
            return found
    return []


_SAMPLE = 8 << 20


def _object(line: bytes | bytearray) -> dict[str, Any] | None:
    try:
        record = orjson.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None
