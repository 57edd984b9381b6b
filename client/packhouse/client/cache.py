"""The cache of a service: what it holds, what stays, and what goes to make room."""

from collections.abc import Collection, Iterator
from typing import TypeVar

import httpx
from pydantic import TypeAdapter

from packhouse.client.connection import Connection, parse, segment
from packhouse.client.errors import Unavailable
from packhouse.client.wire_cache import CacheEntry, CacheUsage, GcReport, GcSpec, RescanReport
from packhouse.client.wire_explain import Explanation

R = TypeVar("R", GcReport, RescanReport, Explanation)

_ENTRIES = TypeAdapter(list[CacheEntry])


class Cache:
    """The cache of a service."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def usage(self) -> CacheUsage:
        """Return what the store holds, by recipe."""
        return self._connection.ask(CacheUsage, "GET", "/v1/cache")

    def entries(self) -> Iterator[CacheEntry]:
        """Yield datasets and plans by id, also those that were evicted."""
        following: str | None = "/v1/cache/entries?limit=1000"
        while following:
            response = self._connection.send("GET", following)
            yield from parse(_ENTRIES, response.content)
            following = response.links.get("next", {}).get("url")

    def pin(self, entry_id: str) -> CacheEntry:
        """Let a dataset or plan stay, and what it needs; raise ``NotFound`` or ``Evicted``."""
        return self._connection.ask(CacheEntry, "PUT", f"/v1/cache/pins/{segment(entry_id)}")

    def unpin(self, entry_id: str) -> CacheEntry:
        """Let a dataset or plan go when its time comes."""
        return self._connection.ask(CacheEntry, "DELETE", f"/v1/cache/pins/{segment(entry_id)}")

    def use(self, *, datasets: Collection[str] = (), plans: Collection[str] = ()) -> None:
        """Tell that datasets and plans are in use, where the store is read without the service: from a mount.

        Once an hour is enough. Raises ``Evicted``.
        """
        body = {"datasets": list(datasets), "plans": list(plans)}
        self._connection.send("POST", "/v1/cache/uses", json=body)

    def gc(self, budget: int | None = None, *, dry_run: bool = False) -> Iterator[GcReport]:
        """Evict what was used longest ago until ``budget`` bytes are left, or the service's own budget.

        Yields how far it is, at last with ``done``. With ``dry_run`` nothing goes. To stop reading stops it.
        """
        body = GcSpec(budget=budget, dry_run=dry_run).model_dump(mode="json")
        return self._steps(GcReport, "POST", "/v1/cache/gc", json=body)

    def remove(self, entry_id: str) -> Iterator[GcReport]:
        """Remove a dataset with the shards that only it has, or a plan; raise for what is pinned or in use."""
        return self._steps(GcReport, "DELETE", f"/v1/cache/entries/{segment(entry_id)}")

    def rescan(self) -> Iterator[RescanReport]:
        """Let the service look again what its store holds; yield how far it is."""
        return self._steps(RescanReport, "POST", "/v1/cache/rescan")

    def _steps(self, model: type[R], method: str, path: str, **request: object) -> Iterator[R]:
        return steps(self._connection, model, method, path, **request)


def steps(connection: Connection, model: type[R], method: str, path: str, **request: object) -> Iterator[R]:
    """Yield how far the service is with something, at last with ``done``; raise ``Unavailable`` if it stops before."""
    timeout = httpx.Timeout(connection.timeout, read=None)
    done = False
    with connection.stream(method, path, timeout=timeout, **request) as response:
        for line in response.iter_lines():
            step = parse(model, line)
            done = step.done
            yield step
    if not done:
        raise Unavailable("the service stopped in the middle of it", "see its log, and ask again")
