"""What pages show: gathered here, drawn by the templates."""

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select

from packhouse.client import charts
from packhouse.client.errors import InvalidRequest, NotFound
from packhouse.client.wire import Job, JobState, Progress
from packhouse.client.wire_cache import GcReport, parse_size
from packhouse.service.dashboard import pictures
from packhouse.service.dashboard.dataset_facts import FactsOfDatasets
from packhouse.service.dashboard.history import History
from packhouse.service.dashboard.lines import Offence, offences
from packhouse.service.dashboard.render import fragment
from packhouse.service.dashboard.stored import Stored
from packhouse.service.parts import Parts
from packhouse.service.rejected import rejected_records
from packhouse.service.tables import JobRow

PHASES = ("waiting", "scanning", "encoding", "done")
LINES = 20
"""Rejected records that a page shows with their lines."""
LARGEST = 8
"""Datasets that the overview shows."""


@dataclass(frozen=True, slots=True)
class Views:
    """The contents of pages, over the parts of a service."""

    parts: Parts
    history: History
    stored: Stored
    facts: FactsOfDatasets

    def title(self, dataset_id: str) -> str:
        """Return what people call a dataset: the job that made it, or nothing."""
        made = self.history.made(dataset_id)
        return made.title if made else ""

    def jobs_now(self) -> str:
        """Draw the jobs that run and wait, and those that ended last."""
        jobs = self.parts.jobs
        active = [*self._jobs(JobState.RUNNING, 10), *self._jobs(JobState.QUEUED, 10)]
        ended = [job for job in jobs.jobs(state=None, before=None, limit=30) if job.state.final][:6]
        return fragment("_jobs_now.html", counts=self.counts(), active=active, ended=ended, done=done)

    def counts(self) -> dict[str, int]:
        """Return how many jobs there are in each state."""
        query = select(JobRow.state, func.count()).group_by(JobRow.state)
        with self.parts.catalog.engine.connect() as connection:
            found = {str(state): int(count) for state, count in connection.execute(query)}
        return {state.value: found.get(state, 0) for state in JobState}

    def overview(self, window: pictures.Window) -> dict[str, Any]:
        """Return what happened in ``window``, and what the store holds."""
        jobs = self.history.since(window.begin(time.time()))
        seen = pictures.over_time(jobs, window, time.time())
        return {
            "seen": seen,
            "encoded": sum(job.encoded for job in jobs),
            "seconds": sum(job.seconds for job in jobs),
            "tokens": sum(job.tokens for job in jobs),
            "ended": len(jobs),
            "blocks_picture": pictures.columns(seen.blocks, seen.labels, "Blocks by outcome over time", "blocks"),
            "rates_picture": pictures.columns({"encoded": seen.rates}, seen.labels, "Throughput over time", "MB/s"),
            **self.store(LARGEST),
        }

    def store(self, count: int) -> dict[str, Any]:
        """Return what the store holds, by recipe and in its largest datasets."""
        usage = self.stored.usage()
        return {
            "usage": usage,
            "recipes": [(one, self.history.recipe(one.recipe)) for one in usage.recipes],
            "pinned": self.stored.pinned(),
            "largest": [(one, self.title(one.id)) for one in self.stored.datasets(offset=0, limit=count, by_size=True)],
        }

    def foreseen(self, budget: str) -> GcReport:
        """Return what eviction would take to keep a budget; raise ``InvalidRequest`` for what is no size."""
        limit = self.parts.settings.store_budget if not budget else parse_size(budget)
        if limit is None:
            raise InvalidRequest("there is no budget to keep", "write a size like 500GB")
        *_, last = self.parts.space.gc(limit, dry_run=True)
        return last

    def job(self, job_id: str) -> str:
        """Draw a job as it stands; raise ``NotFound``."""
        job = self.parts.jobs.job(job_id)
        return fragment(
            "_job_now.html",
            job=job,
            done=done(job.progress),
            phases=PHASES,
            lines=self.offences(job),
            lines_shown=LINES,
            plans=self.stored.plans(offset=0, limit=20, dataset=job.dataset) if job.dataset else [],
        )

    def offences(self, job: Job) -> list[Offence]:
        """Return the first rejected records of a job with their lines; none before it has ended."""
        if not job.state.final:
            return []
        try:
            blocks = self.parts.catalog.rejected(job.id)
            records = list(rejected_records(self.parts.store, blocks, offset=0, limit=LINES))
        except NotFound:  # the shards were evicted, and the sidecars with them
            return []
        return offences(job, records, self.parts.catalog)

    def dataset(self, dataset_id: str) -> dict[str, Any] | None:
        """Return what a dataset is; None while it is counted. Raises ``NotFound``, ``Evicted`` and ``Damaged``."""
        self.parts.space.inventory.check_datasets([dataset_id])
        try:
            facts = self.facts(dataset_id)
        except NotFound:
            raise NotFound(f"there is no dataset {dataset_id}", "the list of datasets has all") from None
        if facts is None:
            return None
        made = self.history.made(dataset_id)
        lines = self.offences(self.parts.jobs.job(made.id)) if made and facts.rejected else []
        return {
            "facts": facts,
            "made": made,
            "pinned": self.stored.pin(dataset_id),
            "lengths": charts.bars(facts.lengths, charts.tokens, "Samples by their length in tokens"),
            "lines": lines,
            "lines_shown": LINES,
            "plans": self.stored.plans(offset=0, limit=50, dataset=dataset_id),
        }

    def _jobs(self, state: JobState, limit: int) -> list[Job]:
        return self.parts.jobs.jobs(state=state, before=None, limit=limit)


def done(progress: Progress) -> float:
    """Return the share of a job's bytes that are in its dataset so far."""
    return progress.bytes_done / progress.bytes if progress.bytes else 0.0
