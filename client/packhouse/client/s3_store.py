"""S3Store: a store in a bucket, through pyarrow's S3 file system.

An object is there whole or not at all, so nothing is renamed and no temporaries stay. pyarrow knows no conditional put;
none is needed, because a key names its content: whoever writes it last writes the same. It cannot abort a multipart
upload either: one that a killed or failed writer leaves is never visible, and a lifecycle rule of the bucket
(``AbortIncompleteMultipartUpload``) takes it away.
"""

import logging
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Self, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as fs

from packhouse.client import faults
from packhouse.client.errors import InvalidRequest, NotFound, Unavailable
from packhouse.client.store import PIECE, check_key

log = logging.getLogger(__name__)
T = TypeVar("T")

SMALL = 4 << 20
"""Bytes of an object up to which pyarrow sends it in one request."""
PATIENCE = 60.0
"""Seconds for which a request is tried again."""
AT_ONCE = 16
"""Requests that wait for their answers side by side."""
CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 60.0

_PASSING = re.compile(
    r"HTTP status 5\d\d|HTTP status 429|NETWORK_CONNECTION|SLOW_DOWN|THROTTLING|INTERNAL_FAILURE|SERVICE_UNAVAILABLE"
    r"|REQUEST_TIME|Timeout|timed out",
    re.IGNORECASE,
)
"""What an error says that may be gone in a moment."""


@dataclass(frozen=True, slots=True)
class Address:
    """The parts of ``s3://[key:secret@]bucket/prefix?endpoint_override=…&scheme=…&region=…``, as pyarrow writes it.

    Keys that it lacks are looked for where AWS's tools look: ``AWS_ACCESS_KEY_ID``, their files, the machine's role;
    an address it lacks, in ``AWS_ENDPOINT_URL``.
    """

    root: str
    """Bucket and prefix."""
    options: dict[str, str] = field(repr=False)

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Take a URI apart; raise ``InvalidRequest`` for what is no address of a store."""
        parts = urlsplit(uri)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if unknown := sorted(set(options) - {"endpoint_override", "scheme", "region"}):
            raise InvalidRequest(f"the S3 address has {unknown[0]!r}", "give endpoint_override, scheme or region")
        bucket = parts.netloc.rpartition("@")[2]
        if parts.scheme != "s3" or not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket):
            shown = bucket if ":" not in bucket else "…"  # a key with an unquoted slash looks like one
            raise InvalidRequest(f"the S3 address has the bucket {shown!r}", "use s3://bucket/prefix")
        if parts.username:
            options |= {"access_key": unquote(parts.username), "secret_key": unquote(parts.password or "")}
        prefix = unquote(parts.path).strip("/")
        return cls(f"{bucket}/{check_key(prefix)}" if prefix else bucket, options)


class S3Store:
    """A ``Store`` under ``s3://bucket/prefix``; ``patience`` is for how many seconds a request is tried again.

    It can be pickled; each process makes its own connections.
    """

    def __init__(self, uri: str, patience: float = PATIENCE) -> None:
        self._uri = uri
        self._patience = patience
        self._address = Address.parse(uri)
        self.retries = 0
        """Requests that were tried again in this process."""
        self._options = tuple(sorted(self._address.options.items()))

    def __reduce__(self) -> tuple[type["S3Store"], tuple[str, float]]:
        return S3Store, (self._uri, self._patience)

    @property
    def location(self) -> str:
        """The address without its keys."""
        return f"s3://{self._address.root}"

    def check(self) -> None:
        """Look for the bucket; write and remove an object."""
        bucket = self._address.root.partition("/")[0]
        if self._tried(lambda: self._small.get_file_info(bucket)).type == fs.FileType.NotFound:
            raise Unavailable(f"there is no bucket {bucket!r}", "make it, or set PACKHOUSE_STORE to another one")
        self.write("tmp/check", b"packhouse")
        self.delete("tmp/check")

    def open(self, key: str) -> pa.Buffer:
        """Return the object's bytes, fetched whole into memory."""
        path = self._path(key)

        def fetch() -> pa.Buffer:
            with self._small.open_input_file(path) as file:
                return file.read_buffer(file.size())

        try:
            return self._tried(fetch)
        except FileNotFoundError:
            raise NotFound(f"the store {self.location} has no {key}") from None

    def write(self, key: str, data: Any) -> None:
        """Put the object, in several parts where it is large."""
        path, content = self._path(key), pa.py_buffer(data)

        def put() -> None:
            faults.point(faults.WRITTEN, key)
            stream = (self._small if content.size <= SMALL else self._large).open_output_stream(path)
            # In one call: a stream that is dropped between two of them would commit what it has.
            stream.write(content)
            stream.close()
            faults.point(faults.RENAMED, key)

        self._tried(put)

    def size(self, key: str) -> int | None:
        """Return the object's length in bytes, or None."""
        info = self._info(key)
        return info.size if info.type == fs.FileType.File else None

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Ask for several at once."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(self.size, keys))

    def pieces(self, key: str) -> Iterator[bytes]:
        """Ask for the object in ranges."""
        path, size = self._path(key), self.size(key)
        if size is None:
            raise NotFound(f"the store {self.location} has no {key}")
        for start in range(0, size, PIECE):

            def fetch(start: int = start) -> bytes:
                with self._small.open_input_file(path) as file:
                    return bytes(file.read_at(PIECE, start))

            try:
                yield self._tried(fetch)
            except FileNotFoundError:
                raise NotFound(f"the store {self.location} has no {key} any more") from None

    def delete(self, key: str) -> None:
        """Delete the object if it is there."""
        path = self._path(key)
        try:
            self._tried(lambda: self._small.delete_file(path))
        except FileNotFoundError:
            return

    def move(self, key: str, to: str) -> None:
        """Copy the object within the bucket if it is there, then delete it."""
        path, target = self._path(key), self._path(to)
        if self.size(key) is not None:
            self._tried(lambda: self._small.copy_file(path, target))
            self.delete(key)

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the keys under ``prefix``, sorted; they are asked for one folder at a time."""
        self._path(prefix)
        yield from self._walk(prefix)

    def sweep(self) -> int:
        """Do nothing: half an object is never there."""
        return 0

    def _walk(self, folder: str) -> Iterator[str]:
        selector = fs.FileSelector(self._path(folder), allow_not_found=True)
        found = self._tried(lambda: self._small.get_file_info(selector))
        names = sorted((one.base_name + "/" * (one.type == fs.FileType.Directory) for one in found), key=str.encode)
        for name in names:
            if name.endswith("/"):
                yield from self._walk(f"{folder}/{name[:-1]}")
            else:
                yield f"{folder}/{name}"

    def _info(self, key: str) -> fs.FileInfo:
        path = self._path(key)
        return self._tried(lambda: self._small.get_file_info(path))

    def _path(self, key: str) -> str:
        return f"{self._address.root}/{check_key(key)}"

    @property
    def _small(self) -> fs.S3FileSystem:
        return _connected(self._options, large=False)

    @property
    def _large(self) -> fs.S3FileSystem:
        return _connected(self._options, large=True)

    def _tried(self, request: Callable[[], T]) -> T:
        """Return what ``request`` returns; try again what may pass, with growing pauses, until patience ends."""
        end, pause = time.monotonic() + self._patience, 0.1
        while True:
            try:
                return request()
            except FileNotFoundError:
                raise
            except OSError as error:
                text = str(error)
                if not _PASSING.search(text):
                    raise Unavailable(
                        f"the store {self.location} refuses ({text})", "check its keys and what they may do"
                    ) from error
                if time.monotonic() + pause > end:
                    fact = f"the store {self.location} did not answer in {self._patience:g} s ({text})"
                    raise Unavailable(fact, "check its address, and ask again") from error
            self.retries += 1
            log.warning("store %s: trying again in %.1f s: %s", self.location, pause, text)
            # Workers that were refused at one moment should not all come back at one moment.
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, 5.0)


@lru_cache
def _connected(options: tuple[tuple[str, str], ...], *, large: bool) -> fs.S3FileSystem:
    """Return a process's connections to an address.

    A small object takes one request if its upload may be delayed until all of it is known. With that, or without
    writing in the background, pyarrow leaves an empty object under the key when a part of a large one fails.
    """
    return fs.S3FileSystem(
        **dict(options),
        allow_delayed_open=not large,
        background_writes=large,
        connect_timeout=CONNECT_SECONDS,
        request_timeout=ANSWER_SECONDS,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),  # tried again, and counted, by the store
    )
