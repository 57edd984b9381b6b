"""The guardian: a small process that outlives the service by a moment and ends whatever it left behind.

Ray's own processes end with the process that started them, but two of them take a minute to notice when it was killed,
and a worker that lives on goes on writing. The guardian keeps a list of the service's descendants; it reads from a pipe
that closes with the service, however that ends, and then kills those that are left. It needs /proc, so Linux;
elsewhere it does nothing.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TICK = 0.5
"""Seconds between two looks at the descendants; a look takes some milliseconds."""
GIVE_UP = 5.0
"""Seconds after which the guardian stops trying to kill."""

Born = dict[int, int]
"""Process id → start time, which together name a process for good."""


@contextmanager
def guarded() -> Iterator[None]:
    """Make sure that no process which is started in this context survives it, nor this process."""
    # Isolated and without site packages: it starts in 20 ms and takes a few megabytes.
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    guardian = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        guardian.communicate()


def _watch(service: int) -> None:
    family: Born = {}
    while not select.select([sys.stdin], [], [], TICK)[0]:
        family = _descendants({service, *_alive(family)})
    deadline = time.monotonic() + GIVE_UP
    while (left := _alive(family)) and time.monotonic() < deadline:
        # Those whose parent has died are nobody's descendants now, but their children are theirs.
        for pid in {*left, *_descendants(set(left))}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _descendants(roots: set[int]) -> Born:
    """Return ``roots`` and all their descendants, this process and the one it guards left out."""
    born: Born = {}
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        if (facts := _facts(path)) is not None:
            pid, parent, born[pid] = facts
            children.setdefault(parent, []).append(pid)
    found, todo = set(), list(roots)
    while todo:
        pid = todo.pop()
        if pid not in found and pid != os.getpid():
            found.add(pid)
            todo += children.get(pid, [])
    return {pid: born[pid] for pid in found if pid in born and pid != int(sys.argv[1])}


def _alive(family: Born) -> Born:
    """Return those of ``family`` that still run."""
    facts = ((pid, start, _facts(Path(f"/proc/{pid}/stat"))) for pid, start in family.items())
    return {pid: start for pid, start, now in facts if now is not None and now[2] == start}


def _facts(path: Path) -> tuple[int, int, int] | None:
    """Return process id, parent and start time; None for a process that has ended."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return None
    pid, _, rest = text.partition(" (")
    state, parent, *others = rest.rpartition(") ")[2].split()
    return None if state in "ZX" else (int(pid), int(parent), int(others[17]))


if __name__ == "__main__":
    _watch(int(sys.argv[1]))
