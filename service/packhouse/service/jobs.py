"""The job table: takes jobs in, runs a bounded number of them in the order they came, tells how they stand."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from packhouse.client.digest import digest_json
from packhouse.client.errors import Mismatch, PackhouseError, Unavailable
from packhouse.client.wire import Job, JobSpec, JobState, Problem, Progress
from packhouse.service.catalog import Catalog
from packhouse.service.problems import Conflict, database_trouble, describe, unexpected
from packhouse.service.work import Work

if TYPE_CHECKING:
    from packhouse.worker.recipe import ResolvedRecipe

log = logging.getLogger(__name__)

SAVE_EVERY = 1.0
"""Seconds between two saves of a running job's progress; a change of state is saved at once."""

Listener = Callable[[bool], None]
"""Told of a change of a job, and whether it is urgent: a change of state rather than of progress."""

_VERSION_GAP = 1 << 20
"""Added to the version of a job that is taken up again: its events must be newer than any that was sent unsaved."""


@dataclass(slots=True)
class _Active:
    """A job that has not ended, as this process knows it."""

    job: Job
    recipe: "ResolvedRecipe | None" = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    cancelling: bool = False
    """Whether a user cancelled it; ``cancelled`` is also set when the service stops."""
    saved_at: float = 0.0


class Jobs:
    """All jobs of this service. Every method may be called from any thread."""

    def __init__(self, catalog: Catalog, work: Work, *, at_once: int = 2) -> None:
        self._catalog = catalog
        self._work = work
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._active: dict[str, _Active] = {}
        self._queue: deque[_Active] = deque()
        self._listeners: dict[str, set[Listener]] = {}
        self._runners = [threading.Thread(target=self._serve, name=f"job-{n}", daemon=True) for n in range(at_once)]
        self._stopping = False
        self.closing = False
        """Whether streams of events should end now."""
        for job, cancelling in catalog.unfinished():
            self._take_up(job, cancelling)

    def start(self) -> None:
        """Begin to run jobs."""
        for runner in self._runners:
            runner.start()

    def stop(self, within: float) -> bool:
        """Interrupt what runs, leave it in the table as queued; return whether all runners ended in time (seconds)."""
        with self._wake:
            self._stopping = True
            for active in self._active.values():
                active.cancelled.set()
            self._wake.notify_all()
        self.hang_up()
        deadline = time.monotonic() + within
        for runner in self._runners:
            if runner.ident is not None:
                runner.join(max(0.0, deadline - time.monotonic()))
        return not any(runner.is_alive() for runner in self._runners)

    def hang_up(self) -> None:
        """End all streams of events."""
        self.closing = True
        with self._lock:
            for job_id in self._listeners:
                self._tell(job_id, urgent=True)

    def submit(self, spec: JobSpec) -> tuple[Job, bool]:
        """Return a new queued job and True, or the identical active one and False; raise what is wrong with it."""
        recipe = self._work.check(spec)
        job = Job(
            id=token_hex(8),
            state=JobState.QUEUED,
            spec=spec,
            recipe=recipe.digest,
            version=1,
            progress=Progress(),
            warnings=list(recipe.warnings),
            created_at=_now(),
        )
        with self._wake:
            if self._stopping:
                raise Unavailable("the service is stopping", "try again in a moment")
            twin = self._catalog.add(job, _key(spec, recipe.digest))
            if twin is not None:
                return self.job(twin.id), False
            active = _Active(job, recipe)
            self._active[job.id] = active
            self._queue.append(active)
            self._wake.notify()
        return job, True

    def job(self, job_id: str) -> Job:
        """Return a job as it stands; raise ``NotFound``."""
        with self._lock:
            if active := self._active.get(job_id):
                return active.job
        return self._catalog.job(job_id)

    def jobs(self, *, state: JobState | None, before: str | None, limit: int) -> list[Job]:
        """Return jobs, newest first; active ones as they stand now."""
        stored = self._catalog.jobs(state=state, before=before, limit=limit)
        with self._lock:
            return [active.job if (active := self._active.get(job.id)) else job for job in stored]

    def cancel(self, job_id: str) -> Job:
        """Cancel a job: one that waits ends now, one that runs in a moment. Raise ``Conflict`` if it has ended."""
        with self._lock:
            active = self._active.get(job_id)
            if active is None:
                job = self._catalog.job(job_id)
                raise Conflict(f"job {job_id} is {job.state} already", "there is nothing to cancel")
            active.cancelling = True
            active.cancelled.set()
            if active in self._queue:
                self._queue.remove(active)
                self._end(active, JobState.CANCELLED)
            else:
                self._save(active)
            return active.job

    @contextmanager
    def listening(self, job_id: str, listener: Listener) -> Iterator[None]:
        """Call ``listener`` after each change of a job, from any thread; it must be quick and must not block."""
        with self._lock:
            self._listeners.setdefault(job_id, set()).add(listener)
        try:
            yield
        finally:
            with self._lock:
                listeners = self._listeners[job_id]
                listeners.discard(listener)
                if not listeners:
                    del self._listeners[job_id]

    @property
    def listeners(self) -> int:
        """How many follow a job now."""
        with self._lock:
            return sum(map(len, self._listeners.values()))

    def _take_up(self, job: Job, cancelling: bool) -> None:
        """Queue again a job that the last process left unfinished; its finished shards will be hits."""
        active = _Active(job, cancelling=cancelling)
        self._active[job.id] = active
        if cancelling:
            self._end(active, JobState.CANCELLED, step=_VERSION_GAP)
            return
        fresh = {"state": JobState.QUEUED, "progress": Progress(), "started_at": None}
        self._change(active, fresh, step=_VERSION_GAP)
        self._save(active)
        self._queue.append(active)

    def _serve(self) -> None:
        while (active := self._next()) is not None:
            self._run(active)

    def _next(self) -> _Active | None:
        with self._wake:
            while not self._queue and not self._stopping:
                self._wake.wait()
            if self._stopping:
                return None
            active = self._queue.popleft()
            self._change(active, {"state": JobState.RUNNING, "started_at": _now()})
            self._save(active)
            return active

    def _run(self, active: _Active) -> None:
        try:
            dataset = self._do(active)
        except Exception as error:
            if active.cancelling:
                self._end(active, JobState.CANCELLED)
            elif active.cancelled.is_set():
                self._put_back(active)
            else:
                self._end(active, JobState.FAILED, error=_explain(active.job, error))
        else:
            self._end(active, JobState.SUCCEEDED, dataset=dataset)

    def _do(self, active: _Active) -> str:
        job, recipe = active.job, active.recipe or self._work.check(active.job.spec)
        if recipe.digest != job.recipe:
            raise Mismatch(
                f"the tokenizer {job.spec.tokenizer!r} or its template is no longer what it was when the job was "
                f"submitted (recipe {job.recipe}, now {recipe.digest})",
                "submit the job again",
            )
        return self._work.run(
            job.spec,
            recipe,
            on_progress=lambda progress: self._on_progress(active, progress),
            keep_rejected=lambda blocks: self._catalog.keep_rejected(job.id, blocks),
            cancelled=active.cancelled,
        )

    def _on_progress(self, active: _Active, progress: Progress) -> None:
        with self._lock:
            self._change(active, {"progress": progress})
            if time.monotonic() - active.saved_at >= SAVE_EVERY:
                self._save(active)

    def _put_back(self, active: _Active) -> None:
        with self._lock:
            self._change(active, {"state": JobState.QUEUED, "started_at": None})
            self._save(active)

    def _end(self, active: _Active, state: JobState, *, step: int = 1, **more: Any) -> None:
        with self._lock:
            self._change(active, {"state": state, "finished_at": _now(), **more}, step=step)
            # What could not be saved is still told from here, and taken up again by the next process.
            if self._save(active):
                del self._active[active.job.id]

    def _change(self, active: _Active, fields: dict[str, Any], *, step: int = 1) -> None:
        active.job = active.job.model_copy(update={**fields, "version": active.job.version + step})
        self._tell(active.job.id, urgent="state" in fields)

    def _save(self, active: _Active) -> bool:
        active.saved_at = time.monotonic()
        try:
            self._catalog.save(active.job, cancelling=active.cancelling)
        except SQLAlchemyError:
            log.exception("job %s: its state could not be saved", active.job.id)
            return False
        return True

    def _tell(self, job_id: str, *, urgent: bool) -> None:
        for listener in self._listeners.get(job_id, ()):
            with suppress(RuntimeError):  # the listener's event loop has ended
                listener(urgent)


def _key(spec: JobSpec, recipe: str) -> str:
    return digest_json({"spec": spec.model_dump(mode="json", exclude={"name"}), "recipe": recipe})


def _explain(job: Job, error: Exception) -> Problem:
    if isinstance(error, DBAPIError):
        log.error("job %s failed", job.id, exc_info=error)
        return describe(database_trouble(error))
    if isinstance(error, PackhouseError):
        log.warning("job %s failed: %s", job.id, error)
        return describe(error)
    log.error("job %s failed", job.id, exc_info=error)
    return unexpected(f"job {job.id}")


def _now() -> datetime:
    return datetime.now(UTC)
