"""A cache and jobs on it without Ray: tasks run in the job's own thread, one at a time in the whole process."""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from packhouse.client.store import LocalStore
from packhouse.client.wire import JobSpec, Progress
from packhouse.worker import pipeline
from packhouse.worker.flights import Flights
from packhouse.worker.pipeline import Outcome
from packhouse.worker.recipe import resolve
from packhouse.worker.shares import Shares

_ONE_AT_A_TIME = threading.Lock()


class Memory(dict[str, bytes]):
    """An index in memory, that counts how often it is asked."""

    asked = 0

    def get(self, keys: list[str]) -> dict[str, bytes]:  # type: ignore[override]
        self.asked += 1
        return {key: self[key] for key in list(keys) if key in self}

    def put(self, items: dict[str, bytes]) -> None:
        self.update(items)


class Inline:
    """Runs tasks in the thread that waits for them; ``before`` is called first, with the blocks to encode."""

    cpus = 1

    def __init__(self, before: Callable[[list[Any]], None]) -> None:
        self.before = before
        self.shares = Shares()
        self.encoded: Counter[str] = Counter()
        """How often each block was encoded."""

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Any]:
        def task() -> Any:
            if function.__name__ != "encode_blocks":
                return function(*args, **kwargs)
            self.before(args[2])
            with _ONE_AT_A_TIME:  # toolkits are a process's, and a worker has one thread
                done = function(*args, **kwargs)
            self.encoded.update(block.digest for block in args[2])
            return done

        return task

    def wait(self, tasks: Sequence[Callable[[], Any]], timeout: float) -> list[Callable[[], Any]]:
        return list(tasks[:1])

    def result(self, task: Callable[[], Any]) -> Any:
        return task()

    def cancel(self, tasks: Sequence[Callable[[], Any]]) -> bool:
        return False


@dataclass
class CachePlace:
    """A store and what is remembered beside it; each job has its own executor, as each service's job has its tasks."""

    store: LocalStore
    tokenizer: Path
    index: Memory = field(default_factory=Memory)
    flights: Flights = field(default_factory=Flights)
    encoded: Counter[str] = field(default_factory=Counter)
    last: Progress = field(default_factory=Progress)

    def spec(self, *sources: Path, **fields: Any) -> JobSpec:
        return JobSpec(**{"sources": [str(one) for one in sources], "tokenizer": str(self.tokenizer)} | fields)

    def run(
        self,
        *sources: Path,
        before: Callable[[list[Any]], None] = lambda blocks: None,
        tell: Callable[[Progress], None] = lambda progress: None,
        cancelled: threading.Event | None = None,
        **fields: Any,
    ) -> Outcome:
        spec, told = self.spec(*sources, **fields), list[Progress]()
        executor = Inline(before)

        def on_progress(progress: Progress) -> None:
            told.append(progress)
            tell(progress)

        try:
            return pipeline.run(
                spec,
                resolve(spec, self.store),
                store=self.store,
                index=self.index,
                executor=cast(pipeline.Executor, executor),
                on_progress=on_progress,
                cancelled=cancelled or threading.Event(),
                flights=self.flights,
            )
        finally:
            self.encoded.update(executor.encoded)
            self.last = told[-1]


def write(path: Path, *texts: str) -> Path:
    """Write a source, and let it grow as old as its times must be before they are trusted."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settle(path)
    return path


def settle(*paths: Path) -> None:
    """Give files times that are long past, as those of most sources are."""
    for path in paths:
        os.utime(path, ns=(10**18, 10**18))  # which sets the time of the change to now
    while paths and time.time_ns() - max(path.stat().st_ctime_ns for path in paths) < 110_000_000:
        time.sleep(0.01)
