"""Places: where sources lie, on a disk or in a bucket (``s3://bucket/key``), opened and listed in the same way.

Keys and address of an object store are the worker's own, from its environment, and never the request's.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TypeVar

import pyarrow as pa
import pyarrow.fs as fs

from packhouse.client.errors import InvalidRequest, PackhouseError, Unavailable
from packhouse.worker import roots
from packhouse.worker.settings import s3_endpoint

S3 = "s3://"
ATTEMPTS = 5
"""Times that a request to an object store is made, with growing pauses, before it counts as failed."""
CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 60.0
READ_AHEAD = 8 << 20
"""Bytes that are asked for at once where an object is read from its start to its end."""
AT_ONCE = 16
"""Objects that are asked about at the same time."""

T = TypeVar("T")
R = TypeVar("R")


def is_object(path: str) -> bool:
    """Return whether a path names an object in a store, or several."""
    return path.startswith(S3)


def opened(path: str) -> pa.NativeFile:
    """Open a source to read it from its start to its end; raise ``OSError``, and ``OutsideRoots``."""
    roots.check(path)
    return pa.BufferedInputStream(_object(path), READ_AHEAD) if is_object(path) else pa.OSFile(path)


def mapped(path: str) -> pa.NativeFile:
    """Open a source to read it at any place; raise ``OSError``, and ``OutsideRoots``."""
    roots.check(path)
    return _object(path) if is_object(path) else pa.memory_map(path)


def read_range(path: str, offset: int, length: int) -> bytes:
    """Return so many bytes of a source, fewer where it ends; raise ``OSError``, and ``OutsideRoots``."""
    roots.check(path)
    if not is_object(path):
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(length)
    with _object(path) as object_:
        count = min(length, max(object_.size() - offset, 0))
        return bytes(object_.read_at(count, offset)) if count else b""


def size_of(path: str) -> int:
    """Return how many bytes a source has; raise ``OSError``."""
    return version_of(path)[0] if is_object(path) else os.path.getsize(path)


def sizes_of(paths: Sequence[str]) -> list[int]:
    """Return how many bytes each source has; raise ``OSError``."""
    return each(size_of, paths, remote=any(map(is_object, paths)))


def version_of(path: str) -> tuple[int, str]:
    """Return an object's size in bytes, and its ETag and version; raise ``OSError``."""
    with _object(path) as object_:
        told = object_.metadata() or {}
        return object_.size(), "".join(bytes(told.get(name, b"")).decode() for name in ("ETag", "VersionId"))


def objects(source: str, suffixes: Sequence[str]) -> list[str]:
    """Return the objects that a path, a prefix or a glob names, those of a prefix by ``suffixes``, sorted by bytes.

    Raises ``InvalidRequest`` for what is no address or names nothing.
    """
    name = source.removeprefix(S3)
    bucket, _, key = name.partition("/")
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket):
        # Not shown: it may hold keys.
        raise InvalidRequest("a source has an address without a bucket's name behind s3://", "use s3://bucket/key")
    if "//" in name or not {".", ".."}.isdisjoint(key.split("/")):
        raise InvalidRequest(f"the source {source!r} has a key that cannot be listed", "write it as it is listed")
    check_glob(key)
    roots.check_pattern(source)
    try:
        info = _filesystem().get_file_info(name.rstrip("/"))
        if info.type == fs.FileType.File and not name.endswith("/"):
            return [source]
        if info.type == fs.FileType.Directory:
            found = [path for path in _under(info.path) if path.endswith(tuple(suffixes))]
        else:
            found = _matching(bucket, key)
    except OSError as error:
        raise trouble(source, error) from None
    if not found:
        remedy = "check bucket and key; of a prefix, objects count that end in " + ", ".join(suffixes)
        raise InvalidRequest(f"the source {source!r} names no object", remedy)
    listed = [S3 + path for path in sorted(found, key=str.encode)]
    roots.check_all(listed)
    return listed


def check_glob(pattern: str) -> None:
    """Raise ``InvalidRequest`` for a glob that goes down any number of folders more than twice.

    The ways to match one path are as many as to share out its folders: eight times took minutes for one file.
    """
    if pattern.split("/").count("**") > 2:
        raise InvalidRequest(f"the glob {pattern!r} has '**' more than twice", "once stands for any number of folders")


def is_of_store(error: OSError) -> bool:
    """Return whether an error came from an object store, and not from what it gave."""
    return "AWS Error" in str(error)


def trouble(path: str, error: OSError) -> PackhouseError:
    """Return what to tell where an object store does not give what it is asked for."""
    text = re.sub(r" \(Request ID.*?\)", "", str(error))
    if "NO_SUCH_BUCKET" in text:
        return InvalidRequest(f"the source {path!r} names a bucket that is not there", "check its name")
    if "ACCESS_DENIED" in text or "HTTP status 401" in text or "INVALID_ACCESS_KEY" in text or "SIGNATURE" in text:
        remedy = "check the workers' keys (AWS_ACCESS_KEY_ID, …) and what they may read"
        return InvalidRequest(f"the source {path!r} may not be read ({text})", remedy)
    remedy = "check AWS_ENDPOINT_URL and AWS_REGION of the workers, and ask again"
    return Unavailable(f"the object store did not give the source {path!r} ({text})", remedy)


def each(function: Callable[[T], R], items: Iterable[T], *, remote: bool) -> list[R]:
    """Return ``function`` of every item, in order; of remote ones several at the same time."""
    if not remote:
        return list(map(function, items))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(function, items))


def _under(folder: str) -> list[str]:
    found = _filesystem().get_file_info(fs.FileSelector(folder, recursive=True))
    return [info.path for info in found if info.type == fs.FileType.File]


def _matching(bucket: str, pattern: str) -> list[str]:
    """Return the objects that a glob names: ``*`` within a part of the key, ``**`` over any number of parts."""
    parts = pattern.split("/")
    plain = next((index for index, part in enumerate(parts) if _MAGIC.search(part)), None)
    if plain is None:
        return []
    folder = "/".join([bucket, *parts[:plain]])
    if _filesystem().get_file_info(folder).type != fs.FileType.Directory:
        return []
    return [path for path in _under(folder) if _matches(path.split("/")[plain + 1 :], parts[plain:])]


_MAGIC = re.compile(r"[*?\[]")


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[start:], pattern[1:] or ["*"]) for start in range(len(parts)))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _object(path: str) -> pa.NativeFile:
    return _filesystem().open_input_file(path.removeprefix(S3))


def _filesystem() -> fs.S3FileSystem:
    return _connected(s3_endpoint())


@lru_cache
def _connected(endpoint: str | None) -> fs.S3FileSystem:
    return fs.S3FileSystem(
        endpoint_override=endpoint,
        connect_timeout=CONNECT_SECONDS,
        request_timeout=ANSWER_SECONDS,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
    )
