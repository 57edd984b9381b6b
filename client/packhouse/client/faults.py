"""Fault points: named places of the commit path where a test makes a process die or a call fail.

``PACKHOUSE_FAULTS`` names a JSON file with a list of faults; it is read once. Without it ``point`` does nothing.

==========  ===========================================================================================================
field       meaning
==========  ===========================================================================================================
point       name of the point, as passed to ``point``
key         glob over the store key at hand, default ``*``
skip        passes to let through first, default 0
times       passes to strike after that, default 1
action      ``kill`` (SIGKILL), an error by its name (``ENOSPC``), or ``delay`` by ``seconds``
==========  ===========================================================================================================

Passes are counted over all processes that read the file, in the folder ``FILE.passes`` beside it: a fault that killed a
worker does not kill the next one too, unless it is told to.
"""

import errno
import fnmatch
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from packhouse.client.settings import faults_file

HALF_WRITTEN = "half-written"
"""Half of a file's bytes are in its temporary file."""
WRITTEN = "written"
"""All bytes are flushed to the disk under the temporary name; in an object store, none is sent yet."""
RENAMED = "renamed"
"""The file has its name, and its folder is not flushed yet; in an object store, it is there."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is to happen where."""

    point: str
    action: str
    key: str = "*"
    skip: int = 0
    times: int = 1
    seconds: float = 0.0

    def strike(self) -> None:
        """Let it happen."""
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.action == "delay":
            time.sleep(self.seconds)
            return
        number = getattr(errno, self.action)
        raise OSError(number, os.strerror(number))


class Faults:
    """The faults of one file."""

    def __init__(self, file: Path) -> None:
        self._faults = [Fault(**fields) for fields in json.loads(file.read_text())]
        self._passes = Path(f"{file}.passes")
        self._passes.mkdir(exist_ok=True)

    def point(self, name: str, key: str) -> None:
        """Count a pass of each fault that is meant, and strike when it is its turn."""
        for number, fault in enumerate(self._faults):
            if fault.point == name and fnmatch.fnmatchcase(key, fault.key):
                turn = self._take(number, fault.skip + fault.times)
                if fault.skip <= turn < fault.skip + fault.times:
                    fault.strike()

    def _take(self, number: int, most: int) -> int:
        for turn in range(most):
            try:
                os.close(os.open(self._passes / f"{number}-{turn}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            return turn
        return most


def use(file: Path | None) -> None:
    """Let the faults of ``file`` happen in this process from now on; None ends them."""
    global _current
    _current = None if file is None else Faults(file)


def point(name: str, key: str) -> None:
    """Pass the fault point ``name`` with the store key ``key``."""
    if _current is not None:
        _current.point(name, key)


_current: Faults | None = None
use(faults_file())
