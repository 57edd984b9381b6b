"""The client of the service: submit jobs, wait for them, build plans, read what they hold."""

import time
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import pyarrow as pa
from httpx_sse import EventSource
from pydantic import TypeAdapter

from packhouse.client.arrow_body import read_batches
from packhouse.client.cache import Cache, steps
from packhouse.client.connection import Connection, parse, segment, to_error
from packhouse.client.errors import PackhouseError, Unavailable
from packhouse.client.format import META_SCHEMA
from packhouse.client.plan import PlanFile, PlanSource
from packhouse.client.preset import read_files, to_zip
from packhouse.client.remote import HttpPlan, HttpStore
from packhouse.client.store import ReadStore
from packhouse.client.wire import Dataset, Job, JobSpec, JobState, Preview, PreviewSpec, Rejected
from packhouse.client.wire_explain import ExplainSpec, Explanation
from packhouse.client.wire_plans import Plan, PlanSpec, Preset

_JOBS = TypeAdapter(list[Job])
_DATASETS = TypeAdapter(list[Dataset])
_PLANS = TypeAdapter(list[Plan])
_REJECTED = TypeAdapter(list[Rejected])

OnProgress = Callable[[Job], None]

SILENCE = 40.0
"""Seconds without even a heartbeat after which a stream of events is taken for dead."""


class JobFailed(PackhouseError):
    """A job that was waited for failed or was cancelled; ``job`` is how it ended."""

    kind = "job-failed"
    status = 409

    def __init__(self, job: Job) -> None:
        error = to_error(job.error) if job.error else None
        detail = f"job {job.id} {job.state}" + (f": {error.detail}" if error else "")
        super().__init__(detail, error.remedy if error else "submit it again to go on from what is done")
        self.job = job

    def __reduce__(self) -> tuple[Any, ...]:
        return JobFailed, (self.job,)


class Client:
    """A service's client. Every method raises the ``PackhouseError`` that the service answers with.

    ``url`` defaults to PACKHOUSE_URL or ``packhouse serve`` on this machine; ``transport`` is for tests and special
    networks; ``timeout`` is in seconds, for each request; ``token`` defaults to PACKHOUSE_TOKEN or what stands in the
    file PACKHOUSE_TOKEN_FILE.
    """

    def __init__(
        self,
        url: str | None = None,
        transport: httpx.BaseTransport | None = None,
        timeout: float = 60.0,
        token: str | None = None,
    ) -> None:
        self.connection = Connection(url, transport, timeout, token)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self.connection.close()

    def submit(self, spec: JobSpec) -> Job:
        """Queue a job, or return the identical one that is still active; raise ``InvalidRequest``."""
        return self.connection.ask(Job, "POST", "/v1/jobs", json=spec.model_dump(mode="json"))

    def preview(self, spec: JobSpec, records: int = 5) -> Preview:
        """Return what the first records of a job would become, trained tokens marked; raise ``InvalidRequest``."""
        body = PreviewSpec(job=spec, records=records).model_dump(mode="json")
        return self.connection.ask(Preview, "POST", "/v1/preview", json=body)

    def explain(
        self,
        spec: JobSpec,
        *,
        scan: bool = False,
        limit: int = 100,
        on_progress: Callable[[Explanation], None] = lambda so_far: None,
    ) -> Explanation:
        """Return what of a job is in the cache and why the rest is not, before it runs; raise ``InvalidRequest``.

        With ``scan``, sources that are new or have changed are read, which takes what it takes. ``limit`` bounds the
        sources that are listed. ``on_progress`` is told the sums so far.
        """
        body = ExplainSpec(job=spec, scan=scan, limit=limit).model_dump(mode="json")
        headers = {"accept": "application/x-ndjson"}
        for found in steps(self.connection, Explanation, "POST", "/v1/cache/explain", json=body, headers=headers):
            on_progress(found)
        return found

    def job(self, job_id: str) -> Job:
        """Return a job as it stands; raise ``NotFound``."""
        return self.connection.ask(Job, "GET", f"/v1/jobs/{segment(job_id)}")

    def jobs(self, state: JobState | None = None, limit: int = 100) -> list[Job]:
        """Return up to ``limit`` (at most 1000) jobs, newest first."""
        query: dict[str, str | int] = {"limit": limit} | ({"state": state.value} if state else {})
        return self.connection.ask(_JOBS, "GET", "/v1/jobs", params=query)

    def cancel(self, job_id: str) -> Job:
        """Cancel a job; one that runs ends in a moment. Raise an error of kind ``conflict`` if it has ended."""
        return self.connection.ask(Job, "DELETE", f"/v1/jobs/{segment(job_id)}")

    def wait(self, job_id: str, on_progress: OnProgress | None = None, patience: float = 120.0) -> Job:
        """Return the job when it has succeeded; raise ``JobFailed`` when it has not.

        ``on_progress`` is called with each new state of the job, about five times a second at most. A service that
        goes away is waited for, up to ``patience`` seconds at a time; then ``Unavailable`` is raised.
        """
        seen: int | None = None
        heard, pause = time.monotonic(), 0.1
        while True:
            try:
                for job in self._events(job_id, seen):
                    seen, heard, pause = job.version, time.monotonic(), 0.1
                    if on_progress:
                        on_progress(job)
                    if job.state is JobState.SUCCEEDED:
                        return job
                    if job.state.final:
                        raise JobFailed(job)
            except Unavailable:
                if time.monotonic() - heard > patience:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, 2.0)

    def rejected(self, job_id: str) -> Iterator[Rejected]:
        """Yield the records that a job kept out: where they lie, and why."""
        return self._pages(_REJECTED, f"/v1/jobs/{segment(job_id)}/rejected")

    def datasets(self) -> Iterator[Dataset]:
        """Yield all datasets, by id."""
        return self._pages(_DATASETS, "/v1/datasets")

    def dataset(self, dataset_id: str) -> Dataset:
        """Return a dataset; raise ``NotFound``."""
        return self.connection.ask(Dataset, "GET", f"/v1/datasets/{segment(dataset_id)}")

    def meta(self, dataset_id: str) -> Iterator[pa.RecordBatch]:
        """Yield the numbers of all samples in order, as ``META_SCHEMA``; raise ``Damaged`` for a stream that is cut."""
        path = f"/v1/datasets/{segment(dataset_id)}/meta"
        with self.connection.stream("GET", path) as response:
            yield from read_batches(response, META_SCHEMA)

    def plan(self, spec: PlanSpec, dry_run: bool = False) -> Plan:
        """Build a plan, or only report on it; the same spec always gives the same plan."""
        query = {"dry_run": "true"} if dry_run else {}
        # Building takes as long as the datasets are large; only connecting has a limit.
        timeout = httpx.Timeout(self.connection.timeout, read=None)
        body = spec.model_dump(mode="json")
        return self.connection.ask(Plan, "POST", "/v1/plans", params=query, json=body, timeout=timeout)

    def put_preset(self, folder: str | PathLike[str]) -> str:
        """Store the preset in ``folder`` (``client/preset.py``) and return its id, for plans of strategy preset."""
        body = to_zip(read_files(Path(folder)))
        headers = {"content-type": "application/zip"}
        return self.connection.ask(Preset, "POST", "/v1/presets", content=body, headers=headers).id

    def plans(self) -> Iterator[Plan]:
        """Yield all plans, by id."""
        return self._pages(_PLANS, "/v1/plans")

    def plan_info(self, plan_id: str) -> Plan:
        """Return a plan's spec and report; raise ``NotFound``."""
        return self.connection.ask(Plan, "GET", f"/v1/plans/{segment(plan_id)}")

    def steps(
        self, plan_id: str, start: int = 0, stop: int | None = None, rank: int = 0, world: int = 1
    ) -> Iterator[pa.RecordBatch]:
        """Yield the packs of ``rank`` of ``world`` in the steps ``start:stop``, as ``plan.STEPS_SCHEMA``."""
        return HttpPlan(self.connection, plan_id).batches(start, stop, rank, world)

    def open_plan(self, plan_id: str, store: ReadStore | None = None) -> PlanSource:
        """Return a plan to iterate: from ``store`` where it is seen from here, else through the service."""
        return HttpPlan(self.connection, plan_id) if store is None else PlanFile.open(store, plan_id)

    def open_store(self, folder: str | PathLike[str] | None = None, budget: int | None = None) -> HttpStore:
        """Return the service's shards as a store: each is fetched once into ``folder`` (default PACKHOUSE_CACHE).

        All processes of a node share the folder and its ``budget`` in bytes (default PACKHOUSE_CACHE_BYTES).
        """
        return HttpStore(self.connection, folder, budget)

    @property
    def cache(self) -> Cache:
        """What the service's store holds, what stays, and what goes to make room."""
        return Cache(self.connection)

    def _events(self, job_id: str, seen: int | None) -> Iterator[Job]:
        headers = {"accept": "text/event-stream", "cache-control": "no-store"}
        if seen is not None:
            headers["last-event-id"] = str(seen)
        timeout = httpx.Timeout(self.connection.timeout, read=SILENCE)
        path = f"/v1/jobs/{segment(job_id)}/events"
        with self.connection.stream("GET", path, headers=headers, timeout=timeout) as response:
            if response.status_code == 204:
                return
            events = EventSource(response).iter_sse()
            yield from (parse(Job, event.data) for event in events if event.data)

    def _pages(self, model: TypeAdapter[list[Any]], path: str) -> Iterator[Any]:
        following: str | None = path
        while following:
            response = self.connection.send("GET", following)
            yield from parse(model, response.content)
            following = response.links.get("next", {}).get("url")
