"""Retries: a transfer is tried again, with growing pauses, until its patience ends."""

import random
import time
from collections.abc import Callable
from typing import TypeVar

from packhouse.client.errors import Damaged, Unavailable

T = TypeVar("T")

PATIENCE = 120.0
"""Seconds that a service may be away: a restart takes some ten."""
ALTERED = 4
"""Times that one transfer may arrive altered or cut before that is taken for the state of the file."""


def retried(
    transfer: Callable[[], T], what: str, patience: float = PATIENCE, progress: Callable[[], int] = lambda: 0
) -> T:
    """Return what ``transfer`` returns; try again on ``Unavailable`` and ``Damaged``.

    A try that has changed ``progress`` begins the patience anew. Raises the last error, of which an ``Unavailable``
    says how long ``what`` was waited for.
    """
    started, pause, altered, before = time.monotonic(), 0.2, 0, progress()
    while True:
        try:
            return transfer()
        except Damaged:
            altered += 1
            if altered == ALTERED:
                raise
        except Unavailable as error:
            if (now := progress()) > before:
                started, pause, before = time.monotonic(), 0.2, now
            waited = time.monotonic() - started
            if waited + pause > patience:
                raise Unavailable(f"{what} did not come in {waited:.0f} s: {error.detail}", error.remedy) from error
        # Ranks that lost one service at one moment should not all come back at one moment.
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, 5.0)
