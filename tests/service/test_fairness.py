"""Which waiting job a service takes next, and what becomes of jobs whose workers were lost."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from sqlalchemy import update

from packhouse.client.wire import Job, JobSpec, JobState, Progress
from packhouse.service.catalog import OVERTAKEN, Catalog
from packhouse.service.jobs import COME_BACKS, LOST, Jobs
from packhouse.service.leases import Signs
from packhouse.service.tables import JobRow
from packhouse.worker.executor import RayLost

SERVICE = "s" * 16


@pytest.fixture
def catalog(database_url: str) -> Iterator[Catalog]:
    with closing(Catalog(database_url)) as opened:
        Signs(opened.engine, SERVICE, "here", 60).beat()
        yield opened


def add(catalog: Catalog, name: str, submitter: str = "anyone", priority: int = 0) -> None:
    spec = JobSpec(sources=[f"/{name}"], tokenizer="/t", priority=priority)
    job = Job(
        id=name,
        state=JobState.QUEUED,
        spec=spec,
        submitter=submitter,
        recipe="r" * 32,
        version=1,
        progress=Progress(),
        created_at=datetime.now(UTC),
    )
    assert catalog.add(job, name) is None


def take(catalog: Catalog, share: int = 100) -> str | None:
    taken = catalog.take(SERVICE, 60, share)
    return None if taken is None else taken[0].id


def end(catalog: Catalog, *names: str) -> None:
    with catalog.engine.begin() as connection:
        connection.execute(update(JobRow).where(JobRow.id.in_(names)).values(state="succeeded", owner=None))


def test_submitters_take_turns(catalog: Catalog) -> None:
    for number in range(3):
        add(catalog, f"a{number}", "ann")
    add(catalog, "b0", "bob")
    add(catalog, "c0", "cy")
    assert [take(catalog) for _ in range(6)] == ["a0", "b0", "c0", "a1", "a2", None]


def test_others_find_a_place_beside_who_has_many_jobs(catalog: Catalog) -> None:
    for number in range(5):
        add(catalog, f"a{number}", "ann")
    assert [take(catalog, share=2) for _ in range(3)] == ["a0", "a1", None]
    add(catalog, "b0", "bob")
    assert take(catalog, share=2) == "b0"
    end(catalog, "a0")
    assert take(catalog, share=2) == "a2"


def test_a_step_of_priority_passes_a_bounded_number_of_jobs(catalog: Catalog) -> None:
    add(catalog, "first")
    for number in range(OVERTAKEN):
        add(catalog, f"n{number}")
    for number in range(3 * OVERTAKEN):
        add(catalog, f"p{number}", priority=1)
    order = []
    while (name := take(catalog)) is not None:
        order.append(name)
    assert order[:3] == ["first", "n0", "p0"]
    last = order.index(f"n{OVERTAKEN - 1}")
    assert OVERTAKEN < last <= 2 * OVERTAKEN  # those before it, and at most so many of those behind it


def test_low_priority_waits_and_is_not_forgotten(catalog: Catalog) -> None:
    add(catalog, "low", priority=-1)
    for number in range(2 * OVERTAKEN):
        add(catalog, f"n{number}")
    order = [take(catalog) for _ in range(2 * OVERTAKEN + 1)]
    assert OVERTAKEN - 1 <= order.index("low") <= OVERTAKEN


@dataclass
class Flaky:
    """Work whose workers are lost so many times."""

    losses: int
    runs: int = 0
    there: bool = True
    submitters: list[str] = field(default_factory=list)

    def check(self, spec: JobSpec) -> Any:
        return cast(Any, type("Recipe", (), {"digest": "r" * 32, "warnings": ()})())

    def run(
        self,
        spec: JobSpec,
        recipe: Any,
        on_progress: Any,
        keep_rejected: Any,
        cancelled: threading.Event,
        submitter: str,
    ) -> str:
        self.runs += 1
        self.submitters.append(submitter)
        if self.runs <= self.losses:
            raise RayLost("the head is gone", "wait")
        return "d" * 32


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(("losses", "state"), [(2, JobState.SUCCEEDED), (COME_BACKS + 1, JobState.FAILED)])
def test_a_job_whose_workers_were_lost_runs_again_a_bounded_number_of_times(
    catalog: Catalog, losses: int, state: JobState
) -> None:
    work = Flaky(losses)
    jobs = Jobs(catalog, work, at_once=1, poll=0.01)
    jobs.start()
    job, _ = jobs.submit(JobSpec(sources=["/a"], tokenizer="/t"))
    until(lambda: jobs.job(job.id).state.final)
    ended = jobs.job(job.id)
    assert (ended.state, work.runs) == (state, min(losses, COME_BACKS) + 1)
    assert ended.error is None or ended.error.type.endswith(LOST)
    assert jobs.stop(10)


def test_no_job_is_begun_while_the_workers_are_away(catalog: Catalog) -> None:
    work = Flaky(0, there=False)
    jobs = Jobs(catalog, work, at_once=2, poll=0.01, ready=lambda: work.there)
    jobs.start()
    job, _ = jobs.submit(JobSpec(sources=["/a"], tokenizer="/t"))
    time.sleep(0.1)
    assert (jobs.job(job.id).state, work.runs) == (JobState.QUEUED, 0)
    work.there = True
    until(lambda: jobs.job(job.id).state is JobState.SUCCEEDED)
    assert work.submitters == ["anyone"]
    assert jobs.stop(10)
