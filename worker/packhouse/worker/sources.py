"""Sources and blocks: which files a job reads, and where content says to cut them.

Sources that are not plain JSON lines are cut as what ``readers`` unpacks; a worker that reads their blocks in order
unpacks each source once.
"""

import glob
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from packhouse.client.digest import digest_bytes
from packhouse.client.errors import InvalidRequest, PackhouseError
from packhouse.worker import roots
from packhouse.worker.cutting import NoLineEnd, cut
from packhouse.worker.places import check_glob, each, is_object, objects, read_range, trouble, version_of
from packhouse.worker.readers import damaged, kind_of, parts_of, unpack
from packhouse.worker.unpacked import Unpacked, open_part

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

    @property
    def content(self) -> str:
        """xxh3-128 of its bytes alone, also where the digest stands for more."""
        return self.digest

    def __str__(self) -> str:
        return f"{self.source!r}, lines {self.first_line + 1} to {self.first_line + self.lines}"


def expand(sources: list[str]) -> list[str]:
    """Return the files that ``sources`` (files, folders, globs, the same in a bucket) name, in order.

    Folders and globs sort by bytes. No data is read beyond the first bytes of each file. Raises ``InvalidRequest`` for
    a relative path, for one that names nothing, and for a file that cannot be read, may not be read, or is of a kind
    that is not known.
    """
    files = listed(sources)
    check_readable(files)
    return files


def listed(sources: list[str]) -> list[str]:
    """Do the same without a look into the files, or at those that are named one by one."""
    files: list[str] = []
    for source in sources:
        if is_object(source):
            files.extend(objects(source, _SUFFIXES))
            continue
        if not os.path.isabs(source):
            scheme, found, _ = source.partition("://")
            if found:  # what follows is not shown: it may hold keys
                detail = f"a source has an address that begins with {scheme[:20]!r}, which is not read"
                raise InvalidRequest(detail, "use a path, or s3://bucket/key")
            raise InvalidRequest(f"the source {source!r} is a relative path", "give an absolute one")
        files.extend(_expand_one(source))
    return files


def check_readable(files: Sequence[str]) -> None:
    """Raise ``InvalidRequest`` for a file that cannot be read or is of a kind that is not known."""
    each(_check_readable, files, remote=any(map(is_object, files)))


def _expand_one(source: str) -> list[str]:
    check_glob(source)
    roots.check_pattern(source)  # before anything is looked at
    if os.path.isdir(source):
        found = [str(path) for path in Path(source).rglob("*") if path.name.endswith(_SUFFIXES)]
        remedy = "name the files, or give them one of the suffixes " + ", ".join(_SUFFIXES)
    elif os.path.exists(source) or not glob.has_magic(source):
        roots.check(source)
        return [source]
    else:
        found = list(set(glob.glob(source, recursive=True)))  # two '**' find a file in more ways than one
        remedy = "check the pattern"
    roots.check_all(found)  # links lead anywhere, and whether there is a file must not be told of those
    found = [path for path in found if os.path.isfile(path)]
    if not found:
        raise InvalidRequest(f"the source {source!r} matches no file of records", remedy)
    return sorted(found, key=os.fsencode)


def _check_readable(file: str) -> None:
    try:
        file.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"the name of the source {file!r} is not UTF-8", "rename it") from None
    try:
        # Before it is opened: opening a pipe would wait for a writer.
        if not is_object(file) and not stat.S_ISREG(os.stat(file).st_mode):
            raise InvalidRequest(f"the source {file!r} is not a regular file", "name a file, a folder or a glob")
        kind_of(file)
    except OSError as error:
        if is_object(file):
            raise trouble(file, error) from None
        raise InvalidRequest(f"the source {file!r} cannot be read ({error.strerror})", "check the path") from None


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tells that a file or an object has not changed, without reading it."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    documents: str = "file"
    """How a .txt file is cut into documents."""
    version: str = ""
    """ETag and version of an object, which has no times and no inode."""

    def __str__(self) -> str:
        return repr(self.path)

    @classmethod
    def of(cls, path: str, documents: str = "file") -> Self:
        """Look at ``path``, and not into it; raise ``SourceChanged`` if it has gone."""
        try:
            if is_object(path):
                size, version = version_of(path)
                return cls(path, size, 0, 0, 0, documents, version)
            info = os.stat(path)
        except OSError as error:
            raise _unreadable(path, error) from None
        return cls(path, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino, documents)

    @property
    def key(self) -> str:
        """Name of the remembered block list."""
        how = "" if self.documents == "file" else f":{self.documents}"
        return f"cuts:{self.path}:{self.size}:{self.mtime_ns}:{self.ctime_ns}:{self.inode}{how}{self.version}"

    def settled(self, now_ns: int | None = None) -> bool:
        """Whether a later write would surely show: False for a file younger than its clock's grain."""
        if self.version:
            return True
        newest = max(self.mtime_ns, self.ctime_ns)
        # A file system that keeps whole seconds leaves no other digits; every other one ticks within 10 ms.
        grain_ns = 2_000_000_000 if self.ctime_ns % 1_000_000_000 == 0 else 100_000_000
        return (time.time_ns() if now_ns is None else now_ns) - newest > grain_ns


def fingerprints(files: Sequence[str], documents: str = "file") -> dict[str, Fingerprint]:
    """Return the fingerprint of each file; raise ``SourceChanged`` if one has gone."""
    found = each(lambda file: Fingerprint.of(file, documents), files, remote=any(map(is_object, files)))
    return dict(zip(files, found, strict=True))


def scan(path: str, documents: str = "file") -> list[Block]:
    """Read ``path`` once and return its blocks, in order; none for an empty file. Holds one block in memory.

    Raises ``SourceChanged`` when it cannot be read, and ``SourceDamaged`` when it is cut or corrupt.
    """
    blocks: list[Block] = []
    line = before = 0
    try:
        how = kind_of(path, documents)
        for part in range(parts_of(path, how)):
            offset = 0
            with open_part(path, how, part) as file:
                for data, lines in cut(file, before):
                    blocks.append(Block(path, offset, len(data), line, lines, digest_bytes(data), how, part))
                    offset += len(data)
                    line += lines
            before += offset
    except NoLineEnd as error:
        raise damaged(path, f"{error} behind line {line}") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    return blocks


def _unreadable(path: str, error: OSError) -> PackhouseError:
    if is_object(path) and not isinstance(error, FileNotFoundError):
        return trouble(path, error)
    reason = os.strerror(error.errno) if error.errno else error
    detail = f"the source {path!r} cannot be read any more ({reason})"
    return SourceChanged(detail, "put it back, or submit the job again")


def read(block: Block) -> bytes:
    """Return the bytes of a block; raise ``SourceChanged`` if they are not those that were scanned."""
    try:
        whole = block.how == "lines"
        data = read_range(block.source, block.offset, block.length) if whole else _read_on(block)
    except OSError as error:
        raise _unreadable(block.source, error) from None
    if len(data) != block.length or digest_bytes(data) != block.content:
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
