"""Flights: which shards are being made now, so that jobs that run at once make each of them once."""

import threading
from collections import Counter
from collections.abc import Iterable


class Flights:
    """The shards that the jobs of one process are making. Every method may be called from any thread.

    Services that share a store do not know of each other's: what they make twice is the same bytes under the same key.
    """

    def __init__(self) -> None:
        self._makers: dict[str, object] = {}
        self._landed = threading.Condition()
        self._landings: Counter[object] = Counter()
        """Shards that each maker, of those that are here, has landed;"""
        self._gone = 0
        """and those of makers that have left."""

    def claim(self, key: str, maker: object) -> bool:
        """Return whether ``maker`` is to make this shard, now or already; False while another one makes it."""
        with self._landed:
            return self._makers.setdefault(key, maker) is maker

    def land(self, keys: Iterable[str], maker: object) -> None:
        """End what ``maker`` does about ``keys``: they are made, or will not be."""
        with self._landed:
            for key in keys:
                if self._makers.get(key) is maker:
                    del self._makers[key]
                    self._landings[maker] += 1
            self._landed.notify_all()

    def leave(self, maker: object) -> None:
        """End everything that ``maker`` does."""
        with self._landed:
            self._makers = {key: other for key, other in self._makers.items() if other is not maker}
            self._gone += self._landings.pop(maker, 0)
            self._landed.notify_all()

    def landings(self, maker: object) -> int:
        """Return how many shards others than ``maker`` landed: while that stays the same, what was absent still is."""
        with self._landed:
            return self._gone + self._landings.total() - self._landings[maker]

    def wait(self, timeout: float) -> None:
        """Return when something has landed, after at most ``timeout`` seconds."""
        with self._landed:
            self._landed.wait(timeout)
