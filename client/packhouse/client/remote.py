"""Plans and shards from elsewhere, for trainers that do not see the store: a service, or an object store."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from os import PathLike
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs

from packhouse.client.arrow_body import DIGEST_HEADER, read_batches
from packhouse.client.connection import Connection
from packhouse.client.errors import Damaged, NotFound, PackhouseError, Unavailable
from packhouse.client.plan import METADATA_KEY, STEPS_SCHEMA, PlanHeader
from packhouse.client.retry import PATIENCE, retried
from packhouse.client.shard_cache import CHUNK, Piece, ShardCache

_PATHS = (
    (re.compile(r"shards/../([0-9a-f]{32})\.arrow"), "/v1/shards/{}"),
    (re.compile(r"shards/../([0-9a-f]{32})\.meta\.arrow"), "/v1/shards/{}/meta"),
    (re.compile(r"datasets/([0-9a-f]{32})\.json"), "/v1/datasets/{}/manifest"),
)
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


class HttpPlan:
    """A plan that is read through the service: a ``PlanSource`` that can be pickled and forked.

    ``patience`` is how long, in seconds, the service may be away.
    """

    def __init__(self, connection: Connection, plan_id: str, patience: float = PATIENCE) -> None:
        self._connection = connection
        self._patience = patience
        self.id = plan_id

    @cached_property
    def header(self) -> PlanHeader:
        """All of the plan but its packs; raise ``NotFound``, or ``Damaged`` unless it is the plan ``id``."""
        query: dict[str, str | int] = {"stop": 0}
        what = f"the header of plan {self.id}"
        response = retried(lambda: self._connection.send("GET", self._path, params=query), what, self._patience)
        with pa.ipc.open_stream(response.content) as reader:
            header = PlanHeader.from_json(json.loads(reader.schema.metadata[METADATA_KEY]))
        if header.id != self.id:
            raise Damaged(f"asked for plan {self.id}, the service sent {header.id}", "build the plan again")
        return header

    def other(self, plan_id: str) -> "HttpPlan":
        """Return another plan of the same service."""
        return HttpPlan(self._connection, plan_id, self._patience)

    def slice(self, start: int, stop: int, rank: int, world: int) -> pa.RecordBatch:
        """Return the packs of ``rank`` of ``world`` in the steps ``start:stop``, as ``STEPS_SCHEMA``."""
        what = f"steps {start} to {stop} of plan {self.id}"
        batches = retried(lambda: list(self.batches(start, stop, rank, world)), what, self._patience)
        if not batches:
            return pa.RecordBatch.from_pylist([], schema=STEPS_SCHEMA)
        return pa.concat_batches(batches)

    def batches(self, start: int, stop: int | None, rank: int, world: int) -> Iterator[pa.RecordBatch]:
        """Yield those packs in pieces, as they arrive; a connection that breaks is not tried again."""
        query = {"start": start, "stop": stop, "rank": rank, "world": world, "header": "false"}
        given = {name: value for name, value in query.items() if value is not None}
        with self._connection.stream("GET", self._path, params=given) as response:
            yield from read_batches(response, STEPS_SCHEMA)

    @property
    def _path(self) -> str:
        return f"/v1/plans/{self.id}/steps"


class HttpSource:
    """The shards and manifests that a service hands out, in ranges."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @contextmanager
    def piece(self, key: str, start: int) -> Iterator[Piece]:
        """Open a file from ``start`` on."""
        headers = {"range": f"bytes={start}-"} if start else {}
        try:
            with self._connection.stream("GET", _path(key), headers=headers) as response:
                digest = response.headers.get(DIGEST_HEADER)
                found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
                begin, total = (int(found[1]), int(found[2])) if found else (0, _length(response.headers))
                if digest is None or begin not in (0, start):
                    raise Damaged(f"{response.url} did not say what it sent", "use a service of this version")
                yield Piece(begin, total, digest, response.iter_bytes(CHUNK))
        except PackhouseError as error:
            if error.status != 416:
                raise
            # All of it is here already, or more than there is: the digest will tell.
            yield Piece(0, 0, "", iter(()))


class HttpStore(ShardCache):
    """The shards and manifests of a service, fetched once into a local folder: a ``ReadStore``."""

    def __init__(
        self,
        connection: Connection,
        folder: str | PathLike[str] | None = None,
        budget: int | None = None,
        patience: float = PATIENCE,
    ) -> None:
        super().__init__(HttpSource(connection), folder, budget, patience)


class FileSystemSource:
    """The files of a store that pyarrow reaches by a URI, ``s3://bucket/store`` or ``gs://…``, in ranges."""

    def __init__(self, uri: str) -> None:
        self._uri = uri

    @property
    def _shown(self) -> str:
        """The URI without the keys that it may carry."""
        parts = urlsplit(self._uri)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()

    @contextmanager
    def piece(self, key: str, start: int) -> Iterator[Piece]:
        """Open a file from ``start`` on; its digest is checked by who reads it, against a manifest."""
        with self._errors(key):
            system, root = pyarrow.fs.FileSystem.from_uri(self._uri)
            file = system.open_input_file(f"{root}/{key}")
        with file:
            with self._errors(key):
                total = file.size()
                file.seek(min(start, total))
            yield Piece(min(start, total), total, None, self._chunks(file, key))

    def _chunks(self, file: pa.NativeFile, key: str) -> Iterator[bytes]:
        while True:
            with self._errors(key):
                chunk = file.read(CHUNK)
            if not chunk:
                return
            yield chunk

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        # Around what is read alone: what is done with it may fail too, as a full disk does.
        try:
            yield
        except FileNotFoundError:
            raise NotFound(f"the store {self._shown} has no {key}") from None
        except OSError as error:
            fact = f"the store {self._shown} cannot be read ({error})"
            raise Unavailable(fact, "check its address and keys") from error


def object_store(uri: str, folder: str | PathLike[str] | None = None, budget: int | None = None) -> ShardCache:
    """Return the store at a URI of pyarrow's file systems, read through the node's cache ``folder``."""
    return ShardCache(FileSystemSource(uri), folder, budget)


def _length(headers: object) -> int:
    return int(headers.get("content-length", -1))  # type: ignore[attr-defined]


def _path(key: str) -> str:
    for pattern, path in _PATHS:
        if match := pattern.fullmatch(key):
            return path.format(match[1])
    raise NotFound(f"the service hands out no {key!r}", "it hands out shards and manifests")
