"""How the service stands, looked up when Prometheus asks: the queue, the store, and whether the parts answer."""

import shutil
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import Engine, func, select
from sqlalchemy.exc import SQLAlchemyError

from packhouse.client.wire import Job, JobState
from packhouse.service.metrics import PREFIX
from packhouse.service.parts import Parts
from packhouse.service.tables import JobRow, ShardRow, ShardState

STORE_SECONDS = 60.0
"""How old the size of the store may be: to add up a million shards takes a moment."""


class Gauges(Collector):
    """The gauges of a service. What cannot be looked up is left out, and ``packhouse_part_up`` says why."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._stored = _Aged(STORE_SECONDS, parts.catalog.engine)

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: the names are fixed, and to look at the values when the registry is made takes a database."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        database = True
        try:
            yield from self._queue()
            yield _gauge("store_bytes", "Bytes of the shards in the store, at most a minute old.", self._stored.get())
        except SQLAlchemyError:
            database = False
        up = GaugeMetricFamily(f"{PREFIX}_part_up", "Whether a part of the service answers.", labels=["part"])
        up.add_metric(["database"], database)
        up.add_metric(["ray"], self._parts.executor.healthy())
        yield up
        yield _gauge("event_listeners", "Streams of events that are open.", self._parts.jobs.listeners)
        retries = getattr(self._parts.store, "retries", 0)  # an object store's
        yield CounterMetricFamily(
            f"{PREFIX}_store_retries", "Requests of this service to the store tried again.", retries
        )
        folder = Path(self._parts.settings.store)
        if folder.is_dir():
            yield _gauge("store_free_bytes", "Bytes left on the disk of the store.", shutil.disk_usage(folder).free)

    def _queue(self) -> Iterator[Metric]:
        """Yield what the job table says: the same from every service on one database."""
        row = JobRow
        by_state = select(row.state, func.count()).group_by(row.state)
        oldest = select(row.body).where(row.state == JobState.QUEUED).order_by(row.serial).limit(1)
        with self._parts.catalog.engine.connect() as connection:
            found = {row[0]: int(row[1]) for row in connection.execute(by_state)}
            body = connection.scalar(oldest)
        jobs = GaugeMetricFamily(f"{PREFIX}_jobs", "Jobs in the table.", labels=["state"])
        for state in JobState:
            jobs.add_metric([state], found.get(state, 0))
        yield jobs
        age = 0.0 if body is None else (datetime.now(UTC) - Job.model_validate_json(body).created_at).total_seconds()
        yield _gauge("queue_age_seconds", "Time since the oldest job that waits was submitted.", age)


class _Aged:
    """The bytes of all shards, added up again when they were for the last time ``seconds`` ago."""

    def __init__(self, seconds: float, engine: Engine) -> None:
        self._seconds, self._engine = seconds, engine
        self._lock = threading.Lock()
        self._bytes = 0
        self._at: float | None = None

    def get(self) -> int:
        """Return the bytes."""
        with self._lock:
            if self._at is None or time.monotonic() - self._at >= self._seconds:
                present = select(func.coalesce(func.sum(ShardRow.bytes), 0)).where(ShardRow.state == ShardState.PRESENT)
                with self._engine.connect() as connection:
                    self._bytes = int(connection.scalar(present) or 0)
                self._at = time.monotonic()
            return self._bytes


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value)
