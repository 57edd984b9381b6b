"""A crew: the tasks of one job on the workers, a bounded number at a time, each tried again when its worker dies."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from packhouse.client.errors import Unavailable
from packhouse.client.store import Store
from packhouse.worker.executor import Executor, Task, WorkerDied
from packhouse.worker.shares import Share
from packhouse.worker.sources import Block, Fingerprint

TASKS_PER_CPU = 2
"""Tasks in flight: one that runs, and one that waits so that no worker does."""
ATTEMPTS = 3
"""Workers that a piece of work may cost before its job fails."""
TICK_SECONDS = 0.25
"""How long to wait for a task before looking around."""
TURN_SECONDS = 0.02
"""And how long where another job has its turn first."""

Piece = TypeVar("Piece", Block, Fingerprint)


class Cancelled(Exception):
    """The job was asked to stop, and has."""


@dataclass(slots=True)
class Crew:
    """What runs for one job."""

    executor: Executor
    store: Store
    cancelled: threading.Event
    submitter: str = ""
    weight: float = 1.0
    """Of its share of the workers."""
    running: dict[Task, Any] = field(default_factory=dict)
    """The group of pieces that each task works on."""
    deaths: int = 0
    _attempts: Counter[str] = field(default_factory=Counter)
    _share: Share = field(init=False)

    def __post_init__(self) -> None:
        self._share = self.executor.shares.join(self.submitter, self.weight)

    def check_cancelled(self) -> None:
        """Raise ``Cancelled`` if the job is to stop."""
        if self.cancelled.is_set():
            raise Cancelled

    def results(self, queue: deque[list[Piece]], begin: Callable[[list[Piece]], Task | None]) -> Iterator[list[Any]]:
        """Yield what tasks returned as they end, and an empty list whenever none has for a while.

        ``begin`` starts the task of a group, or returns None if nothing of it is to be done. ``queue`` may grow
        meanwhile. Raises ``Cancelled``, what a task raised, and ``Unavailable`` for a piece that kills its workers.
        """
        while queue or self.running:
            self.check_cancelled()
            self._begin_all(queue, begin)
            for task in self._wait(bool(queue)):
                group = self.running.pop(task)
                self._share.give_back()
                try:
                    yield self.executor.result(task)
                except WorkerDied as error:
                    queue.extendleft(self._again(group, error))
            yield []

    def disband(self) -> None:
        """End what still runs, and clear away what it was writing."""
        try:
            if self.executor.cancel(list(self.running)) or self.deaths:
                self.store.sweep()
        finally:
            self._share.leave()

    def _begin_all(self, queue: deque[list[Piece]], begin: Callable[[list[Piece]], Task | None]) -> None:
        """Begin the tasks of ``queue`` as long as it is this job's turn."""
        room = TASKS_PER_CPU * self.executor.cpus
        self._share.want(bool(queue))
        while queue and self._share.take(room):
            group = queue.popleft()
            task = begin(group)
            if task is None:
                self._share.give_back(begun=False)
            else:
                self.running[task] = group
        self._share.want(bool(queue))

    def _wait(self, waiting: bool) -> list[Task]:
        """Return the tasks that have ended; ``waiting`` says whether there are more to begin."""
        if not self.running:
            if waiting:
                self._share.wait(TICK_SECONDS)
            return []
        full = len(self.running) >= TASKS_PER_CPU * self.executor.cpus
        return self.executor.wait(list(self.running), TURN_SECONDS if waiting and not full else TICK_SECONDS)

    def _again(self, group: list[Piece], error: WorkerDied) -> list[list[Piece]]:
        """Return the tasks that try ``group`` again, one a piece, so that a deadly one is found."""
        self.deaths += 1
        for piece in group:
            self._attempts[str(piece)] += 1
            if self._attempts[str(piece)] >= ATTEMPTS and len(group) == 1:
                remedy = "look for a huge or odd record there, or give the workers more memory"
                raise Unavailable(f"{ATTEMPTS} workers died on {piece} ({error})", remedy)
        self.store.sweep()
        return [[piece] for piece in reversed(group)]
