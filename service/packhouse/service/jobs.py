"""The job table: takes jobs in, runs a bounded number of them, tells how they stand.

The queue is the database's: any service may run any job, one service at a time. A job that another service runs is
known here as it was last saved.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from packhouse.client.digest import digest_json
from packhouse.client.errors import Mismatch, PackhouseError, Unavailable
from packhouse.client.wire import Job, JobSpec, JobState, Problem, Progress
from packhouse.service.access import ANYONE, Forbidden
from packhouse.service.catalog import Catalog
from packhouse.service.leases import Lease, Signs
from packhouse.service.listeners import Listener, Listeners
from packhouse.service.logs import bound
from packhouse.service.problems import Conflict, database_trouble, describe, unexpected
from packhouse.service.running import Active, Running
from packhouse.service.tokens import Caller, Role
from packhouse.service.work import Work

if TYPE_CHECKING:
    from packhouse.worker.recipe import ResolvedRecipe

log = logging.getLogger(__name__)

LEASE = 20.0
"""Seconds without a sign of life after which a service is dead to the others."""
BEATS = 5
"""Signs of life in that time."""
POLL = 1.0
"""Seconds between two looks at the database for jobs that wait, were cancelled or changed elsewhere."""
AT_ONCE = 16
"""Jobs that run side by side, and share the workers: a small one need not wait for a huge one."""
COME_BACKS = 5
"""Times that a job may lose all its workers at once before it fails."""
LOST = "workers-lost"
RECIPES = 64
"""Recipes of queued jobs that are kept, so that they need not be resolved again."""


class Jobs:
    """The jobs of all services on one database, and the runners of this one. Any thread may call any method."""

    def __init__(
        self,
        catalog: Catalog,
        work: Work,
        *,
        at_once: int = AT_ONCE,
        name: str | None = None,
        lease: float = LEASE,
        poll: float = POLL,
        quota: int | None = None,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """Run ``at_once`` jobs; ``name`` is what no two services that live have in common, such as their home.

        A token may have ``quota`` jobs that wait or run. No job is begun unless ``ready``.
        """
        self._catalog = catalog
        self._work = work
        self.service = token_hex(8)
        self.signs = Signs(catalog.engine, self.service, name or self.service, lease)
        self._lease, self._poll, self._quota, self._ready = lease, poll, quota, ready
        self._share = at_once - at_once // 4
        """Jobs of one submitter that run here at once: others always find a place."""
        self._put_back_times: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._looking = threading.Lock()
        self._recipes: dict[str, ResolvedRecipe] = {}
        self._listeners = Listeners()
        self.running = Running(catalog, self._listeners)
        self._runners = [threading.Thread(target=self._serve, name=f"job-{n}", daemon=True) for n in range(at_once)]
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)
        self._stopping = threading.Event()
        self.closing = False
        """Whether streams of events should end now."""

    def start(self) -> None:
        """Begin to run jobs."""
        self.signs.enter()
        for thread in (self._keeper, *self._runners):
            thread.start()

    def stop(self, within: float) -> bool:
        """Interrupt what runs, leave it in the table as queued; return whether all runners ended in time (seconds)."""
        self._stopping.set()
        self.running.interrupt()
        self._wake.set()
        self.hang_up()
        deadline = time.monotonic() + within
        started = [thread for thread in (*self._runners, self._keeper) if thread.ident is not None]
        for thread in started:
            thread.join(max(0.0, deadline - time.monotonic()))
        with suppress(SQLAlchemyError):  # then the others wait for a lease's time
            self.signs.leave()
        return not any(thread.is_alive() for thread in started)

    def hang_up(self) -> None:
        """End all streams of events."""
        self.closing = True
        self._listeners.tell_all()

    def submit(self, spec: JobSpec, caller: Caller = ANYONE) -> tuple[Job, bool]:
        """Return a new queued job and True, or the identical active one and False; raise what is wrong with it.

        Raises ``Forbidden`` for a priority that the caller may not give, and ``TooManyJobs``.
        """
        if spec.priority > 0 and caller.role < Role.ADMIN:
            fact = f"priority {spec.priority} is above 0, and the token {caller.name!r} may {caller.role.word}"
            raise Forbidden(fact, "leave it at 0 or below, or use a token with the role admin")
        recipe = self._work.check(spec)
        job = Job(
            id=token_hex(8),
            state=JobState.QUEUED,
            spec=spec,
            submitter=caller.name,
            recipe=recipe.digest,
            version=1,
            progress=Progress(),
            warnings=list(recipe.warnings),
            created_at=datetime.now(UTC),
        )
        if self._stopping.is_set():
            raise Unavailable("the service is stopping", "try again in a moment")
        twin = self._catalog.add(job, _key(spec, recipe.digest), None if caller is ANYONE else self._quota)
        if twin is not None:
            return self.job(twin.id), False
        with self._lock:
            self._recipes[job.id] = recipe
            if len(self._recipes) > RECIPES:
                del self._recipes[next(iter(self._recipes))]
        self._wake.set()
        return job, True

    def job(self, job_id: str) -> Job:
        """Return a job as it stands; raise ``NotFound``."""
        return self.running.job(job_id) or self._catalog.job(job_id)

    def jobs(self, *, state: JobState | None, before: str | None, limit: int) -> list[Job]:
        """Return jobs, newest first; those that run here as they stand now."""
        stored = self._catalog.jobs(state=state, before=before, limit=limit)
        return [self.running.job(job.id) or job for job in stored]

    def cancel(self, job_id: str) -> Job:
        """Cancel a job: one that waits ends now, one that runs in a moment. Raise ``Conflict`` if it has ended."""
        before = self.job(job_id)
        job = None if before.state.final else self._catalog.cancel(job_id)
        if job is None:
            raise Conflict(f"job {job_id} is {self.job(job_id).state} already", "there is nothing to cancel")
        if (here := self.running.cancel(job_id)) is not None:
            return here
        self._listeners.tell(job_id, urgent=True)
        return job

    @contextmanager
    def listening(self, job_id: str, listener: Listener) -> Iterator[None]:
        """Call ``listener`` after each change of a job, from any thread; it must be quick and must not block."""
        with self._listeners.listening(job_id, listener):
            yield

    @property
    def listeners(self) -> int:
        """How many follow a job now."""
        return len(self._listeners)

    def _serve(self) -> None:
        while True:
            with self._looking:  # one asks the database for all of them
                active = self._await()
            if active is None:
                return
            with bound(job=active.job.id):
                self._run(active)

    def _await(self) -> Active | None:
        """Return the next job when there is one, or None when the service stops."""
        while not self._stopping.is_set():
            self._wake.clear()  # before the look: what is submitted after it wakes the wait
            try:
                active = self._take() if self._ready() else None
            except SQLAlchemyError as error:
                log.warning("no job could be taken from the database (%s)", type(error).__name__)
                active = None
            if active is not None:
                return active
            self._wake.wait(self._poll)
        return None

    def _take(self) -> Active | None:
        """Take the next job; end those that were cancelled while nobody ran them."""
        while not self._stopping.is_set() and (taken := self._next()) is not None:
            job, lease, cancelling = taken
            active = self.running.begin(job, lease, cancelling=cancelling)
            if not cancelling:
                return active
            self._end(active, JobState.CANCELLED)
        return None

    def _next(self) -> tuple[Job, Lease, bool] | None:
        return self._catalog.take(self.service, self._lease, self._share)

    def _run(self, active: Active) -> None:
        try:
            dataset = self._do(active)
        except Exception as error:
            if active.cancelling:
                self._end(active, JobState.CANCELLED)
            elif active.cancelled.is_set() or self._goes_on(active.job, error):
                self.running.put_back(active)
            else:
                self._end(active, JobState.FAILED, error=_explain(active.job, error))
        else:
            self._end(active, JobState.SUCCEEDED, dataset=dataset)

    def _goes_on(self, job: Job, error: Exception) -> bool:
        """Return whether a job is to run again when the workers are back, which it may do so many times."""
        if not isinstance(error, PackhouseError) or error.kind != LOST:
            return False
        self._put_back_times[job.id] += 1
        log.warning("it waits for the workers, for the time no. %d: %s", self._put_back_times[job.id], error.detail)
        return self._put_back_times[job.id] <= COME_BACKS

    def _do(self, active: Active) -> str:
        job = active.job
        recipe = self._recipes.pop(job.id, None) or self._work.check(job.spec)
        if recipe.digest != job.recipe:
            raise Mismatch(
                f"the tokenizer {job.spec.tokenizer!r} or its template is no longer what it was when the job was "
                f"submitted (recipe {job.recipe}, now {recipe.digest})",
                "submit the job again",
            )
        return self._work.run(
            job.spec,
            recipe,
            on_progress=lambda progress: self.running.advance(active, progress),
            keep_rejected=lambda blocks: self._catalog.keep_rejected(job.id, blocks),
            cancelled=active.cancelled,
            submitter=job.submitter,
        )

    def _end(self, active: Active, state: JobState, **more: Any) -> None:
        self._put_back_times.pop(active.job.id, None)
        self.running.end(active, state, **more)

    def _keep(self) -> None:
        """Give signs of life, and hear what other services did."""
        told: dict[str, tuple[int, JobState]] = {}
        seen_at = time.monotonic()
        while not self._stopping.wait(self._poll):
            try:
                if time.monotonic() - seen_at >= self._lease / BEATS:
                    self.signs.beat()
                    seen_at = time.monotonic()
                self.running.hear(self.signs.standing())
                told = self._follow(told)
            except SQLAlchemyError as error:
                log.warning("the database cannot be asked after jobs (%s)", type(error).__name__)

    def _follow(self, told: dict[str, tuple[int, JobState]]) -> dict[str, tuple[int, JobState]]:
        """Tell listeners of jobs that run elsewhere what was saved there; return what they know now."""
        elsewhere = [job_id for job_id in self._listeners.jobs() if job_id not in self.running]
        found = self._catalog.versions(elsewhere) if elsewhere else {}
        for job_id, (version, state) in found.items():
            before = told.get(job_id)
            if before != (version, state):
                self._listeners.tell(job_id, urgent=before is None or before[1] is not state)
        return found


def _key(spec: JobSpec, recipe: str) -> str:
    return digest_json({"spec": spec.model_dump(mode="json", exclude={"name", "priority"}), "recipe": recipe})


def _explain(job: Job, error: Exception) -> Problem:
    if isinstance(error, DBAPIError):
        log.error("job %s failed", job.id, exc_info=error)
        return describe(database_trouble(error))
    if isinstance(error, PackhouseError):
        log.warning("job %s failed: %s", job.id, error)
        return describe(error)
    log.error("job %s failed", job.id, exc_info=error)
    return unexpected(f"job {job.id}")
