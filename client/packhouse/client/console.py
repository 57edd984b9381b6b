"""What people see of the commands: tables, a summary of a job, and its progress bar."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from packhouse.client.api import OnProgress
from packhouse.client.ledger import Audit
from packhouse.client.plan_diff import PlanDiff
from packhouse.client.wire import Dataset, Job, JobState, Rejected
from packhouse.client.wire import Progress as JobProgress
from packhouse.client.wire_plans import Plan

COLOURS = {JobState.SUCCEEDED: "green", JobState.FAILED: "red", JobState.CANCELLED: "yellow"}


PIPE_WIDTH = 200
"""Columns of results that go to a file or another program, where nobody wants them folded."""


def out() -> Console:
    """Return the console of results."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(markup=False, emoji=False, highlight=False, width=width)


def err() -> Console:
    """Return the console of everything that is not a result."""
    return Console(stderr=True, markup=False, emoji=False, highlight=False)


def jobs_table(jobs: Sequence[Job]) -> Table:
    """Return jobs, one a row."""
    table = listing("job", "state", "done", "tokens", "dataset", "created", "name", folded=("dataset", "name"))
    for job in jobs:
        progress = job.progress
        done = f"{progress.bytes_done / progress.bytes:.0%}" if progress.bytes else "-"
        created = f"{job.created_at.astimezone():%m-%d %H:%M}"
        numbers = (done, f"{progress.tokens:,}", job.dataset or "", created)
        table.add_row(job.id, _state(job.state), *numbers, job.spec.name or "")
    return table


def job_summary(job: Job) -> Table:
    """Return all that matters of one job."""
    progress = job.progress
    table = facts()
    table.add_row("job", job.id)
    table.add_row("state", _state(job.state))
    if job.error:
        table.add_row("reason", f"{job.error.detail}" + (f": {job.error.remedy}" if job.error.remedy else ""))
    if job.dataset:
        table.add_row("dataset", job.dataset)
    table.add_row("recipe", job.recipe)
    for warning in job.warnings:
        table.add_row("warning", warning)
    table.add_row("rows", f"{progress.rows:,} of {progress.records:,} records, in {progress.sources:,} files")
    table.add_row("tokens", f"{progress.tokens:,}, of which {progress.trained_tokens:,} are trained")
    table.add_row("blocks", _blocks(progress))
    table.add_row("speed", f"{progress.mb_per_s:.1f} MB/s, {progress.bytes_read / 1e6:,.1f} MB read")
    for name, counts in (("engines", progress.engines), ("slower paths", progress.fallbacks)):
        if counts:
            table.add_row(name, _counts(counts))
    if progress.rejected:
        table.add_row("kept out", f"{_counts(progress.rejected)} (packhouse jobs rejected {job.id})")
    if progress.truncated or progress.dropped:
        lost = f"{progress.truncated:,} truncated, {progress.dropped:,} dropped, {progress.truncated_tokens:,} tokens"
        table.add_row("left out", lost)
    if progress.split:
        table.add_row("split", f"{progress.split:,} records, to {progress.fragments:,} samples")
    return table


def datasets_table(datasets: Sequence[Dataset]) -> Table:
    """Return datasets, one a row."""
    table = listing("dataset", "kind", "shards", "rows", "tokens", "trained", "MB", folded=("dataset", "name"))
    for one in datasets:
        share = f"{one.trained_tokens / one.tokens:.1%}" if one.tokens else "-"
        numbers = (f"{one.shards:,}", f"{one.rows:,}", f"{one.tokens:,}", share, f"{one.bytes / 1e6:,.1f}")
        table.add_row(one.id, str(one.recipe.get("kind", "")), *numbers)
    return table


def rejected_table(records: Sequence[Rejected]) -> Table:
    """Return rejected records, one a row."""
    table = listing("source", "line", "reason", "detail", folded=("source", "detail"))
    for record in records:
        table.add_row(record.source, f"{record.line:,}", record.reason, record.detail)
    return table


def plan_report(plan: Plan) -> Table:
    """Return how good a plan is."""
    spec, report = plan.spec, plan.report
    table = facts()
    table.add_row("plan", plan.id if plan.stored else f"{plan.id} (dry run: not stored)")
    table.add_row("strategy", f"{spec.strategy}, packs of {spec.pack_length:,}")
    table.add_row("steps", f"{report.steps:,} of {spec.ranks} ranks × {spec.micro_batches} micro-batches")
    table.add_row("packs", f"{report.packs:,}, and {report.empty_packs:,} empty ones to fill the last step")
    table.add_row("samples", f"{report.samples:,} over {spec.epochs} epochs, {report.tokens:,} tokens")
    table.add_row(
        "padding", f"{report.padding:.4%}, {report.padding_tokens:,} tokens; whole steps {report.fill:.4%} full"
    )
    segments = f"{report.segments_per_pack_mean:.1f} a pack, {report.segments_per_pack_max:,} at most"
    table.add_row("segments", f"{report.segments:,}, {segments}")
    table.add_row("imbalance", f"mean {report.imbalance_mean:.4f}, 99th percentile {report.imbalance_p99:.4f}")
    micro = f"mean {report.micro_imbalance_mean:.4f}, 99th percentile {report.micro_imbalance_p99:.4f}"
    table.add_row("at micro-batches", f"{micro}; waiting adds {report.excess:.3%} to the time")
    for name, one in report.compared.items():
        table.add_row("", f"{name}: mean {one.micro_mean:.4f}, 99th percentile {one.micro_p99:.4f}")
    randomness = "too few steps to tell" if report.randomness is None else f"{report.randomness:.2f} (1 is random)"
    table.add_row("randomness", randomness)
    labels = f"{report.trained_tokens:,}" + ("" if report.trained_exact else " at most")
    table.add_row("labels", labels)
    for share in report.datasets if len(report.datasets) > 1 else []:
        table.add_row("dataset", f"{share.id}: {share.share:.2%} of the tokens, {share.epochs:.3g} epochs")
    table.add_row("shards a step", f"{report.shards_per_step_mean:.1f}")
    table.add_row("truncated", f"{report.truncated_samples:,} samples, {report.truncated_tokens:,} tokens")
    table.add_row("split", f"{report.split_samples:,} samples")
    table.add_row("dropped", f"{report.dropped_samples:,} samples, {report.dropped_tokens:,} tokens")
    table.add_row("empty", f"{report.zero_length:,} samples without a token")
    return table


def plan_difference(diff: PlanDiff) -> Table:
    """Return how two plans differ."""
    table = listing("what", "a", "b", folded=("a", "b"))
    table.add_row("plan", diff.a, diff.b)
    table.add_row("packs in common", f"{diff.packs_in_common:,} of {diff.packs[0]:,}", f"of {diff.packs[1]:,}")
    first = "none" if diff.first_step is None else f"{diff.first_step:,}"
    table.add_row("steps in common", f"{diff.steps_in_common:,}", f"first that differs: {first}")
    for name, (one, other) in {**diff.spec, **diff.figures}.items():
        table.add_row(name, str(one), str(other))
    return table


@contextmanager
def progress_bar(console: Console) -> Iterator[OnProgress]:
    """Show a job's progress while the context lasts; yield what to call with each new state of it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[numbers]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("waiting", total=None, numbers="")

        def show(job: Job) -> None:
            done = job.progress
            total = done.bytes or None
            bar.update(task, description=_phase(job), total=total, completed=done.bytes_done, numbers=_numbers(done))

        yield show


def audit_summary(found: Audit) -> Table:
    """Return what an audit found, with the first places of each fault."""
    table = facts()
    table.add_row("plan", found.plan)
    table.add_row("steps", f"{found.steps:,}")
    table.add_row("planned", f"{found.packs:,} packs, {found.tokens:,} tokens")
    table.add_row("exactly once", f"{found.delivered:,} packs")
    for name in ("missing", "repeated", "altered", "unplanned"):
        places = getattr(found, name)
        if places:
            first = ", ".join(f"step {step} slot {slot}" for step, slot in places[:5])
            table.add_row(name, f"{len(places):,} packs: {first}{', …' if len(places) > 5 else ''}")
    table.add_row("result", "each planned token was delivered exactly once" if found.exact else "NOT exact")
    return table


def _phase(job: Job) -> str:
    return job.progress.phase if job.state is JobState.RUNNING else job.state.value


def _numbers(progress: JobProgress) -> str:
    eta = f"{progress.eta_seconds:,.0f} s left" if progress.eta_seconds is not None else ""
    parts = (f"{progress.rows:,} rows", f"{progress.tokens:,} tokens", f"{progress.mb_per_s:.1f} MB/s", eta)
    return " · ".join(part for part in (*parts, _blocks(progress)) if part)


def _blocks(progress: JobProgress) -> str:
    misses = sum(progress.misses.values())
    reasons = f" ({_counts(progress.misses)})" if misses else ""
    return f"{progress.hits:,} hits, {misses:,} misses{reasons}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))


def _state(state: JobState) -> Text:
    return Text(state.value, style=COLOURS.get(state, ""))


def listing(*columns: str, folded: tuple[str, ...]) -> Table:
    """Return an empty table; where the terminal is narrow, the columns ``folded`` take several lines."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        fold = column in folded
        table.add_column(column, no_wrap=not fold, overflow="fold", min_width=8 if fold else None)
    return table


def facts() -> Table:
    """Return an empty table of names and values."""
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    return table
