"""Verifying: how far a check of the store is, and the slow one that goes on in the background."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from sqlalchemy.exc import SQLAlchemyError

from packhouse.client.errors import PackhouseError
from packhouse.client.store import Store
from packhouse.client.wire_verify import VerifyFinding, VerifyReport

if TYPE_CHECKING:
    from packhouse.worker.verify import Verified

log = logging.getLogger(__name__)

TICK = 0.25
"""Seconds between two reports without a finding."""
SAVE_EVERY = 5.0
"""Seconds between two notes of how far the background check is."""
BETWEEN = 3600.0
"""Seconds between the end of a background check and the next one's start."""
VERIFYING = "verifying"
"""Name of the lock of the service that does it: several may share a store."""
POSITION = "verify:position"
"""Key of the index under which the last shard of the background check stands."""


class Index(Protocol):
    """Small values that outlive the service."""

    def get(self, keys: list[str]) -> dict[str, bytes]:
        """Return the values of those ``keys`` that are there."""

    def put(self, items: dict[str, bytes]) -> None:
        """Set values."""


def reports(verified: "Iterator[Verified]", whole: int | None = None, tick: float = TICK) -> Iterator[VerifyReport]:
    """Yield how far a check is: at each finding, every ``tick`` seconds, and when it is done.

    ``whole`` is how many shards it is of; None goes by their ids, which are spread evenly.
    """
    report, told = VerifyReport(), time.monotonic()
    yield report
    for one in verified:
        counted: dict[str, float] = {
            "bytes": report.bytes + one.bytes,
            "unfinished": report.unfinished + one.unfinished,
        }
        if one.kind == "dataset":
            counted |= {"datasets": report.datasets + 1, "share": 1.0}
        else:
            share = (report.shards + 1) / whole if whole else int(one.id[:8], 16) / 2**32
            counted |= {"shards": report.shards + 1, "share": share}
        report = report.model_copy(update=counted)
        for found in one.findings:
            finding = VerifyFinding(file=found.file, fault=found.fault, moved=found.moved)
            report = report.model_copy(update={"damaged": report.damaged + 1})
            yield report.model_copy(update={"finding": finding})
        if time.monotonic() - told >= tick:
            told = time.monotonic()
            yield report
    yield report.model_copy(update={"share": 1.0, "done": True})


class Stopped(Exception):
    """The check is to end now."""


class Pace:
    """Slows a reader down to ``rate`` bytes a second, and raises ``Stopped`` once ``stopping`` is set."""

    def __init__(self, rate: float, stopping: threading.Event) -> None:
        self._rate, self._stopping = rate, stopping
        self._owed = 0.0

    def __call__(self, size: int) -> None:
        """Wait until ``size`` more bytes may have been read."""
        self._owed += size / self._rate
        if self._owed > 0.01:
            begun = time.monotonic()
            self._stopping.wait(self._owed)
            self._owed -= time.monotonic() - begun
        if self._stopping.is_set():
            raise Stopped


class BackgroundCheck:
    """Verifies the whole store again and again, slowly; goes on where the service ended the last time.

    ``lock`` says whether this service is the one to do it now, and ``unlock`` lets another one.
    """

    def __init__(
        self,
        store: Store,
        index: Index,
        mb_per_s: float,
        *,
        lock: Callable[[], bool] = lambda: True,
        unlock: Callable[[], None] = lambda: None,
        between: float = BETWEEN,
        save_every: float = SAVE_EVERY,
    ) -> None:
        self._store, self._index = store, index
        self._lock, self._unlock = lock, unlock
        self._between, self._save_every = between, save_every
        self._stopping = threading.Event()
        self._pace = Pace(mb_per_s * 1e6, self._stopping) if mb_per_s else None
        self.damaged = 0
        """Files that it found to be damaged, since this process started."""
        self._thread = threading.Thread(target=self._run, name="verify", daemon=True)

    def start(self) -> None:
        """Begin, unless the rate is 0."""
        if self._pace is not None:
            self._thread.start()

    def stop(self) -> None:
        """End within a piece of a file."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(5)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                if self._lock():
                    try:
                        self._check()
                    finally:
                        self._unlock()
            except Stopped:
                return
            except (PackhouseError, SQLAlchemyError) as error:
                log.warning("the check of the store is put off: %s", error)
            self._stopping.wait(self._between)

    def _check(self) -> None:
        """Verify what is behind the position, then begin anew."""
        from packhouse.worker.verify import verify

        assert self._pace is not None
        after = self._index.get([POSITION]).get(POSITION, b"").decode()
        saved = time.monotonic()
        for one in verify(self._store, after=after, spend=self._pace):
            for finding in one.findings:
                self.damaged += 1
                log.warning("%s is %s, and was moved to %s", finding.file, finding.fault, finding.moved or "nowhere")
            if one.kind == "shard" and time.monotonic() - saved >= self._save_every:
                saved = time.monotonic()
                self._index.put({POSITION: one.id.encode()})
        self._index.put({POSITION: b""})
