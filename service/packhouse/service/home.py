"""The home folder: made when missing, and used by one service at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packhouse.client.errors import Unavailable


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """Hold the home's lock, which the kernel takes back however this process ends; raise ``Unavailable``."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        file = open(home / "lock", "a+")  # noqa: SIM115 - open as long as the lock is held
    except OSError as error:
        raise Unavailable(f"the folder {home} cannot be written ({error.strerror})", "set PACKHOUSE_HOME") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            fact = f"another service (process {owner}) uses the home {home}"
            raise Unavailable(fact, "stop it, or set PACKHOUSE_HOME to another folder") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
