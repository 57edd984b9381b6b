"""Plans and shards through the service, for trainers that do not see the store."""

import json
import re
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from os import PathLike
from typing import TypeVar

import pyarrow as pa

from packhouse.client.arrow_body import DIGEST_HEADER, read_batches
from packhouse.client.connection import Connection
from packhouse.client.digest import digest_bytes
from packhouse.client.errors import Damaged, NotFound, Unavailable
from packhouse.client.plan import METADATA_KEY, STEPS_SCHEMA, PlanHeader
from packhouse.client.settings import cache_folder
from packhouse.client.store import LocalStore

T = TypeVar("T")

TRIES = 6
"""Times that a transfer is tried: about 6 seconds in all, then the last error is raised."""

_PATHS = (
    (re.compile(r"shards/../([0-9a-f]{32})\.arrow"), "/v1/shards/{}"),
    (re.compile(r"shards/../([0-9a-f]{32})\.meta\.arrow"), "/v1/shards/{}/meta"),
    (re.compile(r"datasets/([0-9a-f]{32})\.json"), "/v1/datasets/{}/manifest"),
)


class HttpPlan:
    """A plan that is read through the service: a ``PlanSource`` that can be pickled and forked."""

    def __init__(self, connection: Connection, plan_id: str) -> None:
        self._connection = connection
        self.id = plan_id

    @cached_property
    def header(self) -> PlanHeader:
        """All of the plan but its packs; raise ``NotFound``, or ``Damaged`` unless it is the plan ``id``."""
        query: dict[str, str | int] = {"stop": 0}
        response = _retried(lambda: self._connection.send("GET", self._path, params=query))
        with pa.ipc.open_stream(response.content) as reader:
            header = PlanHeader.from_json(json.loads(reader.schema.metadata[METADATA_KEY]))
        if header.id != self.id:
            raise Damaged(f"asked for plan {self.id}, the service sent {header.id}", "build the plan again")
        return header

    def slice(self, start: int, stop: int, rank: int, world: int) -> pa.RecordBatch:
        """Return the packs of ``rank`` of ``world`` in the steps ``start:stop``, as ``STEPS_SCHEMA``."""
        batches = _retried(lambda: list(self.batches(start, stop, rank, world)))
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


class HttpStore:
    """The shards and manifests of a service, fetched once into a local folder: a ``ReadStore``.

    What arrives is checked against its digest before it takes its name in the folder, so processes can share one.
    """

    def __init__(self, connection: Connection, folder: str | PathLike[str] | None = None) -> None:
        self._connection = connection
        self._local = LocalStore(cache_folder() if folder is None else folder)

    def open(self, key: str) -> pa.Buffer:
        """Return a memory map of the fetched file; raise ``NotFound``, or ``Damaged`` if it never arrives whole."""
        if self._local.size(key) is None:
            self._local.write(key, _retried(lambda: self._fetch(key)))
        return self._local.open(key)

    def _fetch(self, key: str) -> bytes:
        response = self._connection.send("GET", _path(key))
        if digest_bytes(response.content) != response.headers.get(DIGEST_HEADER):
            raise Damaged(f"{key} was altered or cut on its way from {response.url}", "try again")
        return response.content


def _path(key: str) -> str:
    for pattern, path in _PATHS:
        if match := pattern.fullmatch(key):
            return path.format(match[1])
    raise NotFound(f"the service hands out no {key!r}", "it hands out shards and manifests")


def _retried(transfer: Callable[[], T]) -> T:
    pause = 0.2
    for _ in range(TRIES - 1):
        try:
            return transfer()
        except (Unavailable, Damaged):
            time.sleep(pause)
            pause *= 2
    return transfer()
