"""What ended jobs were: their sums, read once from the job table and kept, since an ended job never changes."""

import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

from sqlalchemy import Engine, Select, select

from packhouse.client.wire import JobState
from packhouse.service.database import chunks
from packhouse.service.tables import JobRow

MOST = 20_000
"""Jobs that are kept, the newest ones."""
EVERY = 1.0
"""Seconds between two looks at the table, however many people watch."""


@dataclass(frozen=True, slots=True)
class Ended:
    """An ended job, as far as pictures tell of it."""

    id: str
    title: str
    recipe: str
    recipe_title: str
    dataset: str | None
    at: float
    """When it ended, in seconds since 1970."""
    hits: int
    misses: dict[str, int]
    tokens: int
    encoded: int
    """Source bytes that it encoded."""
    seconds: float
    """That it encoded for."""


class History:
    """The newest ended jobs of all services on a database. Any thread may call any method."""

    def __init__(self, engine: Engine, most: int = MOST) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._ended: deque[Ended] = deque(maxlen=most)
        self._of_dataset: dict[str, Ended] = {}
        self._recipes: dict[str, str] = {}
        self._open: set[int] = set()
        """Jobs that had not ended at the last look."""
        self._seen = 0
        self._looked = -EVERY

    def since(self, begin: float) -> list[Ended]:
        """Return the jobs that ended after ``begin``, seconds since 1970."""
        with self._fresh():
            return [one for one in self._ended if one.at >= begin]

    def made(self, dataset_id: str) -> Ended | None:
        """Return the last job that made a dataset, if it is known."""
        with self._fresh():
            return self._of_dataset.get(dataset_id)

    def recipe(self, digest: str) -> str:
        """Return what people call a recipe, empty where no job is known that had it."""
        with self._fresh():
            return self._recipes.get(digest, "")

    def _fresh(self) -> threading.Lock:
        """Return the lock, to be held while reading, after a look at the table if the last one was long ago."""
        with self._lock:
            if time.monotonic() - self._looked >= EVERY:
                for body in self._newly_ended():
                    self._add(_ended(json.loads(body)))
                self._looked = time.monotonic()
        return self._lock

    def _newly_ended(self) -> Iterator[str]:
        """Yield the bodies of jobs that have ended since the last look, in the order they came."""
        least = min(self._open, default=self._seen + 1)
        states = select(JobRow.serial, JobRow.state).where(JobRow.serial >= least).order_by(JobRow.serial.desc())
        with self._engine.connect() as connection:
            found = connection.execute(states.limit(self._ended.maxlen)).all()
            final = {serial: JobState(state).final for serial, state in found}
            fresh = sorted(s for s, over in final.items() if over and (s > self._seen or s in self._open))
            for some in chunks(fresh):
                yield from connection.scalars(_bodies(some))
        self._open = {serial for serial, over in final.items() if not over}
        self._seen = max(final, default=self._seen)

    def _add(self, job: Ended) -> None:
        self._ended.append(job)
        self._recipes[job.recipe] = job.recipe_title
        if job.dataset:
            self._of_dataset[job.dataset] = job


def _bodies(serials: list[int]) -> Select[str]:
    return select(JobRow.body).where(JobRow.serial.in_(serials)).order_by(JobRow.serial)


def _ended(job: dict[str, Any]) -> Ended:
    progress, spec = job["progress"], job["spec"]
    encoded = sum(miss["bytes"] for miss in progress.get("why", ()))
    rate = progress["mb_per_s"] * 1e6
    return Ended(
        id=job["id"],
        title=title_of(spec),
        recipe=job["recipe"],
        recipe_title=recipe_title_of(spec),
        dataset=job["dataset"],
        at=datetime.fromisoformat(job["finished_at"] or job["created_at"]).timestamp(),
        hits=progress["hits"],
        misses=progress["misses"],
        tokens=progress["tokens"],
        encoded=encoded if rate else 0,
        seconds=encoded / rate if rate else 0.0,
    )


def title_of(spec: dict[str, Any]) -> str:
    """Return what people call a job: its name, or its first source."""
    if spec.get("name"):
        return str(spec["name"])
    first, *more = spec["sources"]
    short = PurePosixPath(first).name or str(first)
    return f"{short} and {len(more):,} more" if more else short


def recipe_title_of(spec: dict[str, Any]) -> str:
    """Return what people call a recipe: its tokenizer, what records become, and the longest sample."""
    kind = spec.get("kind") or spec.get("format") or ""
    longest = f"up to {spec['max_length']:,}" if spec.get("max_length") else ""
    named = (PurePosixPath(spec["tokenizer"]).name or spec["tokenizer"], kind, longest)
    return " · ".join(part for part in named if part)
