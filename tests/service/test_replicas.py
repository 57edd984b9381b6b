"""Several services on one database: each job is run by one of them, told by all, and outlives them."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from sqlalchemy import text

from packhouse.client.store import LocalStore
from packhouse.client.wire import Job, JobSpec, JobState, Progress
from packhouse.service.catalog import Catalog
from packhouse.service.events import snapshots
from packhouse.service.jobs import Jobs
from packhouse.service.problems import Conflict
from packhouse.service.work import KeepRejected
from packhouse.worker import recipe
from packhouse.worker.recipe import ResolvedRecipe

LEASE = 1.0


@dataclass
class Steps:
    """Work that goes on when it is told to, and counts who does it."""

    store: LocalStore
    go_on: threading.Event = field(default_factory=threading.Event)
    begun: list[str] = field(default_factory=list)
    deaf: bool = False
    """Whether it does not hear that it is cancelled."""

    def check(self, spec: JobSpec) -> ResolvedRecipe:
        return recipe.resolve(spec, self.store, [])

    def run(
        self,
        spec: JobSpec,
        recipe: ResolvedRecipe,
        on_progress: Callable[[Progress], None],
        keep_rejected: KeepRejected,
        cancelled: threading.Event,
        submitter: str,
    ) -> str:
        self.begun.append(spec.sources[0])
        rows = 0
        while not self.go_on.wait(0.02):
            rows += 1
            on_progress(Progress(rows=rows))
            if cancelled.is_set() and not self.deaf:
                raise RuntimeError("cancelled")
        return "d" * 32


class Replicas:
    """Two services on one database."""

    def __init__(self, url: str, store: LocalStore, spec: Callable[[int], JobSpec]) -> None:
        self.catalogs = [Catalog(url), Catalog(url)]
        self.works = [Steps(store), Steps(store)]
        self.jobs = [self._jobs(number) for number in (0, 1)]
        self.spec = spec

    def _jobs(self, number: int) -> Jobs:
        return Jobs(self.catalogs[number], self.works[number], at_once=1, lease=LEASE, poll=0.05)

    def running(self, job: Job) -> int:
        """Return which service runs a job, once one does."""
        until(lambda: any(job.id in jobs.running for jobs in self.jobs))
        return next(number for number, jobs in enumerate(self.jobs) if job.id in jobs.running)

    def fall_asleep(self, number: int) -> None:
        """Let a service give no signs of life, as one that is stopped or cut off does."""
        self.jobs[number].signs.beat = lambda: None  # type: ignore[method-assign]
        with self.catalogs[number].engine.begin() as connection:
            connection.execute(
                text("UPDATE services SET seen_at = 0 WHERE id = :id"), {"id": self.jobs[number].service}
            )


def until(condition: Callable[[], bool], seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def replicas(database_url: str, tmp_path: Path, texts: Path, tokenizer_dir: Path) -> Iterator[Replicas]:
    def spec(number: int) -> JobSpec:
        return JobSpec(sources=[str(texts)], tokenizer=str(tokenizer_dir), max_length=number + 1)

    with ExitStack() as stack:
        both = Replicas(database_url, LocalStore(tmp_path / "store"), spec)
        for catalog in both.catalogs:
            stack.enter_context(closing(catalog))
        for jobs in both.jobs:
            jobs.start()
        yield both
        for work in both.works:
            work.go_on.set()
        ended = [jobs.stop(10) for jobs in both.jobs]
        assert all(ended)


def test_two_services_share_the_queue_and_run_each_job_once(replicas: Replicas) -> None:
    ids = [replicas.jobs[number % 2].submit(replicas.spec(number))[0].id for number in range(6)]
    until(lambda: all(work.begun for work in replicas.works))
    for work in replicas.works:
        work.go_on.set()
    until(lambda: all(replicas.jobs[0].job(one).state is JobState.SUCCEEDED for one in ids))
    assert sum(len(work.begun) for work in replicas.works) == 6


def test_an_identical_job_is_found_through_another_service(replicas: Replicas) -> None:
    job, new = replicas.jobs[0].submit(replicas.spec(0))
    twin, again = replicas.jobs[1].submit(replicas.spec(0))
    assert (new, again, twin.id) == (True, False, job.id)


def test_a_job_is_cancelled_through_another_service(replicas: Replicas) -> None:
    first, _ = replicas.jobs[0].submit(replicas.spec(0))
    other = 1 - replicas.running(first)
    second, _ = replicas.jobs[other].submit(replicas.spec(1))
    replicas.running(second)
    third, _ = replicas.jobs[0].submit(replicas.spec(2))
    assert replicas.jobs[other].cancel(first.id).state is JobState.RUNNING
    until(lambda: replicas.jobs[other].job(first.id).state is JobState.CANCELLED)
    replicas.running(third)
    assert len(replicas.works[0].begun + replicas.works[1].begun) == 3
    with pytest.raises(Conflict, match="cancelled already"):
        replicas.jobs[other].cancel(first.id)


def test_events_of_a_job_come_through_another_service(replicas: Replicas) -> None:
    job, _ = replicas.jobs[0].submit(replicas.spec(0))
    runs = replicas.running(job)

    async def follow() -> list[Job]:
        seen = []
        async for one in snapshots(replicas.jobs[1 - runs], job.id, None, heartbeat=5):
            assert one is not None, "no news for five seconds"
            seen.append(one)
            if len(seen) == 2:
                replicas.works[runs].go_on.set()
        return seen

    seen = asyncio.run(follow())
    assert [one.version for one in seen] == sorted({one.version for one in seen})
    assert seen[-1].state is JobState.SUCCEEDED
    assert seen[1].progress.rows > 0


def test_what_a_service_that_slept_saves_is_refused(replicas: Replicas) -> None:
    job, _ = replicas.jobs[0].submit(replicas.spec(0))
    sleeper = replicas.running(job)
    other = 1 - sleeper
    replicas.works[sleeper].deaf = True
    before = replicas.jobs[sleeper].job(job.id).version
    replicas.fall_asleep(sleeper)
    until(lambda: job.id in replicas.jobs[other].running)
    replicas.works[sleeper].go_on.set()  # it wakes up, and has a dataset to tell of
    until(lambda: job.id not in replicas.jobs[sleeper].running)
    now = replicas.jobs[sleeper].job(job.id)
    assert (now.state, now.dataset, now.version > before + 1000) == (JobState.RUNNING, None, True)
    replicas.works[other].go_on.set()
    until(lambda: replicas.jobs[sleeper].job(job.id).state is JobState.SUCCEEDED)


def test_a_service_that_ends_leaves_its_jobs_to_the_other_at_once(replicas: Replicas) -> None:
    job, _ = replicas.jobs[0].submit(replicas.spec(0))
    ends = replicas.running(job)
    begun = time.monotonic()
    assert replicas.jobs[ends].stop(10)
    until(lambda: job.id in replicas.jobs[1 - ends].running)
    assert time.monotonic() - begun < LEASE
