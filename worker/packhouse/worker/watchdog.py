"""The watchdog: interrupts a thread that takes too much time or memory; signals would work in the main thread only."""

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class PastLimits(Exception):
    """The body of ``limited`` took more than it may."""


@contextmanager
def limited(seconds: float, growth: int) -> Iterator[None]:
    """Raise ``PastLimits`` in this thread when the body takes longer, or the process grows by more bytes meanwhile."""
    thread = threading.get_ident()
    _WATCHDOG.watch(thread, time.monotonic() + seconds, _resident() + growth)
    try:
        yield
    finally:
        _WATCHDOG.leave(thread)


def _resident() -> int:
    """Return the bytes of memory that this process holds; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0


_PAGE = os.sysconf("SC_PAGE_SIZE")


class _Watchdog:
    """One thread that interrupts those past their limits; it starts with the first and ends with the last."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._deadlines: dict[int, tuple[float, int]] = {}
        """By thread: when to interrupt it, and beyond how many bytes of memory."""
        self._running = False

    def watch(self, thread: int, deadline: float, most: int) -> None:
        """Interrupt ``thread`` at ``deadline``, or when the process holds ``most`` bytes, unless it leaves before."""
        with self._change:
            self._deadlines[thread] = deadline, most
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def leave(self, thread: int) -> None:
        """Forget ``thread``, and an interruption that is on its way to it."""
        with self._change:
            if self._deadlines.pop(thread, None) is None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)

    def _run(self) -> None:
        idle_since = time.monotonic()
        with self._change:
            while self._deadlines or time.monotonic() - idle_since < 1:
                self._change.wait(0.05)
                now, held = time.monotonic(), _resident()
                if self._deadlines:
                    idle_since = now
                past = [thread for thread, (end, most) in self._deadlines.items() if end < now or most < held]
                for thread in past:
                    del self._deadlines[thread]
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(PastLimits))
            self._running = False


_WATCHDOG = _Watchdog()
