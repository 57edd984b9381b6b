"""The watchdog: interrupts a thread that takes too much time or memory; signals would work in the main thread only.

It cannot interrupt a single step that asks for all the memory at once. That gets none, by the system's limit on the
process's own data, which stands for as long as any thread is watched; mapped files and shared memory are not in it.
"""

import ctypes
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class PastLimits(Exception):
    """The body of ``limited`` took more than it may."""


@contextmanager
def limited(seconds: float, growth: int) -> Iterator[None]:
    """Raise ``PastLimits`` in this thread when the body takes longer, or the process grows by more bytes meanwhile.

    Where it asks for that many at once, ``MemoryError`` is raised.
    """
    thread = threading.get_ident()
    held, data = _memory()
    _WATCHDOG.watch(thread, time.monotonic() + seconds, held + growth, data + growth if data else 0)
    try:
        yield
    finally:
        _WATCHDOG.leave(thread)


def _memory() -> tuple[int, int]:
    """Return the bytes of memory that this process holds, and those of its own data; 0 where the system is silent."""
    try:
        with open("/proc/self/statm") as file:
            pages = file.read().split()
    except OSError:
        return 0, 0
    return int(pages[1]) * _PAGE, int(pages[5]) * _PAGE


_PAGE = os.sysconf("SC_PAGE_SIZE")


class _Watchdog:
    """One thread that interrupts those past their limits; it starts with the first and ends with the last."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._deadlines: dict[int, tuple[float, int]] = {}
        """By thread: when to interrupt it, and beyond how many bytes of memory."""
        self._running = False
        self._inside = 0
        self._limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        """The limits on the process's data while no thread is watched."""

    def watch(self, thread: int, deadline: float, most: int, data: int) -> None:
        """Interrupt ``thread`` at ``deadline``, or when the process holds ``most`` bytes, unless it leaves before.

        Meanwhile the process's own data are at most ``data`` bytes, if that is not 0.
        """
        with self._change:
            self._deadlines[thread] = deadline, most
            self._inside += 1
            if self._inside == 1:
                self._limits = resource.getrlimit(resource.RLIMIT_DATA)
                if data and (self._limits[0] < 0 or data < self._limits[0]):
                    resource.setrlimit(resource.RLIMIT_DATA, (data, self._limits[1]))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def leave(self, thread: int) -> None:
        """Forget ``thread``, and an interruption that is on its way to it."""
        with self._change:
            self._inside -= 1
            if not self._inside:
                resource.setrlimit(resource.RLIMIT_DATA, self._limits)
            if self._deadlines.pop(thread, None) is None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)

    def _run(self) -> None:
        idle_since = time.monotonic()
        with self._change:
            while self._deadlines or time.monotonic() - idle_since < 1:
                self._change.wait(0.05)
                now, held = time.monotonic(), _memory()[0]
                if self._deadlines:
                    idle_since = now
                past = [thread for thread, (end, most) in self._deadlines.items() if end < now or most < held]
                for thread in past:
                    del self._deadlines[thread]
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(PastLimits))
            self._running = False


_WATCHDOG = _Watchdog()
