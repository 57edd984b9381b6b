"""FetchAhead: a few threads that fetch what will be needed soon, in the order in which it will be."""

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

THREADS = 4


class FetchAhead:
    """Calls ``fetch`` for keys in the background; what fails there fails again, loudly, when it is needed."""

    def __init__(self, fetch: Callable[[str], None]) -> None:
        self._fetch = fetch
        self._start_anew()

    def want(self, keys: list[str]) -> None:
        """Fetch ``keys`` next, behind those that are wanted already."""
        if self._process != os.getpid():
            self._start_anew()  # threads do not come along in a fork
        with self._lock:
            waiting = set(self._keys)
            self._keys.extend(key for key in keys if key not in waiting)
            for _ in range(min(THREADS, len(self._keys)) - self._running):
                self._running += 1
                # Daemons: a program that ends must not wait for what it will not use.
                threading.Thread(target=self._work, daemon=True).start()

    def _start_anew(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._keys: deque[str] = deque()
        self._running = 0

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._keys:
                    self._running -= 1
                    return
                key = self._keys.popleft()
            # Whatever it is: a thread that ended by it would be counted as one that still works.
            with suppress(Exception):
                self._fetch(key)
