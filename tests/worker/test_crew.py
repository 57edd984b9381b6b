"""Crews of several jobs on the same workers: who is given the next task, and what a cancelled job leaves free."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest

from packhouse.worker.crew import TASKS_PER_CPU, Cancelled, Crew
from packhouse.worker.executor import Executor
from packhouse.worker.shares import Shares


class OneByOne:
    """Workers that do their tasks in the order in which they were begun, each when it is waited for."""

    cpus = 2

    def __init__(self) -> None:
        self.shares = Shares()
        self.begun: deque[str] = deque()
        self.ended: list[str] = []

    def submit(self, name: str) -> str:
        self.begun.append(name)
        return name

    def wait(self, tasks: Sequence[str], timeout: float) -> list[str]:
        if self.begun and self.begun[0] in tasks:
            self.ended.append(self.begun.popleft())
            return [self.ended[-1]]
        return []

    def result(self, task: str) -> list[str]:
        return [task]

    def cancel(self, tasks: Sequence[str]) -> bool:
        self.begun = deque(one for one in self.begun if one not in tasks)
        return False


class Job:
    """A job of so many tasks, which goes on a step when it is told to."""

    def __init__(self, workers: OneByOne, name: str, tasks: int, submitter: str = "") -> None:
        self.name, self.cancelled = name, threading.Event()
        self.crew = Crew(cast(Executor, workers), cast(Any, None), self.cancelled, submitter or name)
        begin: Callable[[list[Any]], Any] = lambda group: workers.submit(group[0])  # noqa: E731
        queue = deque([[f"{name} {number}"] for number in range(tasks)])
        self.steps: Iterator[list[Any]] = self.crew.results(cast(Any, queue), begin)
        self.done = False

    def step(self) -> None:
        if not self.done and next(self.steps, None) is None:
            self.done = True
            self.crew.disband()


def run(workers: OneByOne, jobs: list[Job], until: Callable[[], bool]) -> None:
    for _ in range(100_000):
        if until():
            return
        for job in jobs:
            job.step()
    raise AssertionError("it did not end")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """All jobs are in one thread here, so none may wait for another."""
    monkeypatch.setattr("packhouse.worker.crew.TICK_SECONDS", 0.0)


def test_a_small_job_ends_after_its_own_few_tasks_and_as_many_others() -> None:
    workers = OneByOne()
    huge = Job(workers, "huge", 5000)
    run(workers, [huge], lambda: len(workers.ended) >= 500)
    small = Job(workers, "small", 6)
    before = len(workers.ended)
    run(workers, [huge, small], lambda: small.done)
    room = TASKS_PER_CPU * workers.cpus
    assert len(workers.ended) - before <= room + 2 * 6 + room
    assert not huge.done


def test_ten_jobs_of_one_submitter_get_no_more_than_one_of_another() -> None:
    workers = OneByOne()
    jobs = [Job(workers, f"a{number}", 200, "ann") for number in range(10)] + [Job(workers, "b", 200, "bob")]
    run(workers, jobs, lambda: jobs[-1].done)
    assert 350 <= len(workers.ended) <= 450
    run(workers, jobs, lambda: all(job.done for job in jobs))
    assert len(workers.ended) == 11 * 200


def test_a_cancelled_job_leaves_the_workers_to_the_others() -> None:
    workers = OneByOne()
    huge, other = Job(workers, "huge", 5000), Job(workers, "other", 100)
    run(workers, [huge, other], lambda: len(workers.ended) >= 50)
    huge.cancelled.set()
    with pytest.raises(Cancelled):
        huge.step()
    huge.crew.disband()
    before = len(workers.ended)
    run(workers, [other], lambda: other.done)
    assert all(name.startswith("other") for name in workers.ended[before:])


def test_a_task_that_cannot_be_begun_holds_no_place() -> None:
    workers = OneByOne()
    crew = Crew(cast(Executor, workers), cast(Any, None), threading.Event(), "broken")

    def fail(group: list[Any]) -> Any:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        list(crew.results(cast(Any, deque([["x"]])), fail))
    crew.disband()
    other = Job(workers, "other", 10)
    run(workers, [other], lambda: other.done)
