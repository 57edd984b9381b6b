"""Running jobs: those that this service runs, as they stand now, saved under their leases."""

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from packhouse.client.wire import Job, JobState, Progress
from packhouse.service.catalog import Catalog
from packhouse.service.leases import Lease
from packhouse.service.listeners import Listeners

log = logging.getLogger(__name__)

SAVE_EVERY = 1.0
"""Seconds between two saves of a running job's progress; a change of state is saved at once."""


@dataclass(slots=True)
class Active:
    """A job that this service runs."""

    job: Job
    lease: Lease
    cancelled: threading.Event = field(default_factory=threading.Event)
    cancelling: bool = False
    """Whether a user cancelled it; ``cancelled`` is also set when the service stops."""
    lost: bool = False
    """Whether another service has it now: nothing of it is told or saved from here any more."""
    saved_at: float = field(default_factory=time.monotonic)

    def cancel(self) -> None:
        """Let it end, since a user wants it to."""
        self.cancelling = True
        self.cancelled.set()


class Running:
    """The jobs that this service runs, and those that ended and could not be saved yet. Any thread may call it."""

    def __init__(self, catalog: Catalog, listeners: Listeners) -> None:
        self._catalog, self._listeners = catalog, listeners
        self._lock = threading.RLock()
        self._active: dict[str, Active] = {}
        self._interrupted = False

    def __contains__(self, job_id: str) -> bool:
        with self._lock:
            return job_id in self._active

    def job(self, job_id: str) -> Job | None:
        """Return a job as it stands, or None if it does not run here."""
        with self._lock:
            active = self._active.get(job_id)
            return None if active is None else active.job

    def begin(self, job: Job, lease: Lease, *, cancelling: bool) -> Active:
        """Take in a job that was taken from the table."""
        active = Active(job, lease, cancelling=cancelling)
        with self._lock:
            self._active[job.id] = active
            if self._interrupted:
                active.cancelled.set()
        self._listeners.tell(job.id, urgent=True)
        return active

    def cancel(self, job_id: str) -> Job | None:
        """Cancel a job and return it, or None if it does not run here."""
        with self._lock:
            if active := self._active.get(job_id):
                active.cancel()
                return active.job
        return None

    def interrupt(self) -> None:
        """Let all end now, those too that are yet to begin: the service stops."""
        with self._lock:
            self._interrupted = True
            for active in self._active.values():
                active.cancelled.set()

    def advance(self, active: Active, progress: Progress) -> None:
        """Note how far a job is."""
        with self._lock:
            self._change(active, {"progress": progress})
            if time.monotonic() - active.saved_at >= SAVE_EVERY:
                self._save(active)

    def put_back(self, active: Active) -> None:
        """Let a job wait again, for this service or another."""
        with self._lock:
            self._change(active, {"state": JobState.QUEUED, "started_at": None})
            self._settle(active)

    def end(self, active: Active, state: JobState, **more: Any) -> None:
        """Note that a job has ended, and how."""
        with self._lock:
            self._change(active, {"state": state, "finished_at": datetime.now(UTC), **more})
            self._settle(active)

    def hear(self, standing: Mapping[str, tuple[int, bool]]) -> None:
        """Act on what the table says of the jobs that run here: cancelled, or ended and not saved yet."""
        with self._lock:
            for job_id, active in list(self._active.items()):
                if active.job.state is not JobState.RUNNING:
                    self._settle(active)
                elif standing.get(job_id) == (active.lease.number, True):
                    active.cancel()

    def _settle(self, active: Active) -> None:
        """Save a job that does not run any more; until that works it is told from here, and tried again."""
        if self._save(active):
            self._drop(active)

    def _change(self, active: Active, fields: dict[str, Any]) -> None:
        if not active.lost:
            active.job = active.job.model_copy(update={**fields, "version": active.job.version + 1})
            self._listeners.tell(active.job.id, urgent="state" in fields)

    def _save(self, active: Active) -> bool:
        """Return whether nothing is left to be saved."""
        if active.lost:
            return True
        active.saved_at = time.monotonic()
        try:
            if not self._catalog.save(active.job, active.lease):
                self._lose(active)
        except SQLAlchemyError:
            log.exception("job %s: its state could not be saved", active.job.id)
            return False
        return True

    def _lose(self, active: Active) -> None:
        """Stop what another service does now."""
        log.warning("job %s: this service was not seen for too long, and another one runs it now", active.job.id)
        active.lost = True
        active.cancelled.set()
        self._drop(active)
        self._listeners.tell(active.job.id, urgent=True)

    def _drop(self, active: Active) -> None:
        if self._active.get(active.job.id) is active:
            del self._active[active.job.id]
