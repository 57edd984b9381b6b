"""FetchAhead: in order, in the background, and nothing that fails ends it."""

import threading

from packhouse.client.errors import Unavailable
from packhouse.client.fetch_ahead import FetchAhead


def test_ahead_means_in_order_and_in_the_background() -> None:
    seen: list[str] = []
    done = threading.Event()

    def fetch(key: str) -> None:
        seen.append(key)
        if key == "c":
            raise Unavailable("away")
        if len(seen) == 6:
            done.set()

    ahead = FetchAhead(fetch)
    ahead.want(["a", "b", "c"])
    ahead.want(["d", "e", "f"])
    assert done.wait(10)
    assert sorted(seen) == ["a", "b", "c", "d", "e", "f"]


def test_nothing_that_fails_ahead_ends_what_fetches() -> None:
    done = threading.Event()

    def fetch(key: str) -> None:
        if key == "last":
            done.set()
        raise OSError(28, key)

    ahead = FetchAhead(fetch)
    for key in "abcdefgh":
        ahead.want([key])
    ahead.want(["last"])
    assert done.wait(10)
