"""What the service counts and measures, as Prometheus reads it at ``/metrics``.

Two kinds of counters follow a job. What was *done* (bytes read and encoded, rows audited, fallbacks) counts while it is
done, and stays done if the job is cancelled. What came *out* (hits and misses, rows, tokens, bad records) counts once,
when the job has succeeded or failed: blocks that an audit throws away leave the job's numbers again, and a counter
cannot fall. Every label has a small set of values that the program itself names; reasons that others name are bounded.
"""

import platform
from collections.abc import Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

from packhouse.client.wire import Progress
from packhouse.client.wire_plans import Plan, Strategy

if TYPE_CHECKING:
    from packhouse.worker.work import Done

PREFIX = "packhouse"

# Labels that will come. Each series begins at 0 with the program: of one that begins later Prometheus misses the first
# increase, which for a job's blocks is all of it.
ENGINES = ("gigatoken", "huggingface")
FALLBACKS = ("audit", "control_tokens", "engine", "offsets", "renderer")
FAILURES = ("bad-records", "damaged", "internal", "source-changed", "source-damaged", "unavailable")
MISSES = (
    *("new_block", "evicted", "damaged", "audit", "files"),
    *("format", "kind", "field", "tokenizer", "template", "loss", "bos_id", "eos_id", "max_length", "overflow"),
    *("record", "fields", "now", "control_tokens", "untrained", "tokenize"),
)
BAD_RECORDS = (
    *("bad_extra", "bad_tokens", "broken_picture", "control_token", "empty", "invalid_json", "invalid_utf8"),
    *(
        "missing_field",
        "no_sound_mask",
        "not_an_object",
        "nothing_to_train",
        "picture_count",
        "template",
        "tokenize_error",
    ),
    *("too_large", "unsupported", "wrong_type"),
)

MOST_REASONS = 50
"""Reasons that records are counted by; those that come later are one, ``other``."""

_WRITE_BUCKETS = (0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
_JOB_BUCKETS = (1, 10, 60, 300, 1800, 3600, 4 * 3600, 12 * 3600, 24 * 3600)
_HTTP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

# The time at which each series began would double their number.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """The instruments of one service, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(namespace=PREFIX, registry=self.registry)
        build = self._gauge("build_info", "The program that runs; always 1.", "version", "python")
        build.labels(version("packhouse"), platform.python_version()).set(1)
        self._work()
        self._results()
        self._plans()
        self._http()
        self._begin()

    def _work(self) -> None:
        self.read_bytes = self._counter("read_bytes", "Bytes of sources read, to scan or to encode them.")
        self.audited_rows = self._counter("audited_rows", "Rows encoded by both engines and compared.")
        self.mismatches = self._counter("audit_mismatches", "Jobs in which an audit found the fast way wrong.")
        self.fallbacks = self._counter("fallbacks", "Slower ways taken.", "reason")
        self.encoded_blocks = self._counter("encoded_blocks", "Blocks encoded, made twice or not.", "engine")
        self.encoded_bytes = self._counter("encoded_bytes", "Bytes of source blocks encoded.")
        self.encoded_tokens = self._counter("encoded_tokens", "Tokens of encoded blocks.")
        self.shard_write = self._histogram(
            "shard_write_seconds", "Time to write one shard's files to the store.", _WRITE_BUCKETS
        )

    def _results(self) -> None:
        self.lookups = self._counter(
            "lookups", "Blocks of ended jobs, in the cache or not, and what had changed.", "result", "reason"
        )
        self.rows = self._counter("rows", "Samples in the datasets of ended jobs.")
        self.tokens = self._counter("tokens", "Tokens in the datasets of ended jobs.")
        self.trained_tokens = self._counter("trained_tokens", "Tokens to be trained on, in those datasets.")
        self.records = self._counter("records", "Records in the sources of ended jobs.")
        self._reasons = set(BAD_RECORDS)
        self.bad_records = self._counter("bad_records", "Records kept out of ended jobs.", "reason")
        self.source_bytes = self._counter("source_bytes", "Length of the sources of ended jobs, encoded or hit.")
        self.failures = self._counter("job_failures", "Jobs that failed, by the kind of their problem.", "kind")
        self.job_seconds = self._histogram("job_duration_seconds", "Time that jobs ran.", _JOB_BUCKETS, "result")

    def _plans(self) -> None:
        self.plan_requests = self._counter("plan_requests", "Plans asked for.", "strategy", "result")
        self.plan_seconds = self._histogram("plan_build_seconds", "Time to build a plan.", _HTTP_BUCKETS)
        self.plan_fill = self._gauge("plan_fill_ratio", "Share of slots with tokens, last plan built.", "strategy")
        self.plan_imbalance = self._gauge(
            "plan_imbalance_ratio",
            "Greatest over mean cost of the ranks at a step, last plan built.",
            "strategy",
        )

    def _http(self) -> None:
        self.http = self._histogram(
            "http_request_duration_seconds",
            "Time until an answer begins.",
            _HTTP_BUCKETS,
            *("method", "route", "status"),
        )
        self.http_bytes = self._counter("http_response_bytes", "Bytes of the bodies of answers.", "route")
        self.http_open = self._gauge("http_requests_open", "Requests that are being answered, streams included.")

    def _begin(self) -> None:
        """Let the series begin that will come."""
        for counter, values in (
            (self.encoded_blocks, ENGINES),
            (self.fallbacks, FALLBACKS),
            (self.failures, FAILURES),
            (self.bad_records, BAD_RECORDS),
            (self.job_seconds, ("succeeded", "failed", "interrupted")),
        ):
            for value in values:
                counter.labels(value)
        for result, reasons in {"hit": ("", "shared"), "miss": MISSES}.items():
            for reason in reasons:
                self.lookups.labels(result, reason)
        for strategy in get_args(Strategy):
            for result in ("built", "known", "dry_run"):
                self.plan_requests.labels(strategy, result)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, namespace=PREFIX, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, namespace=PREFIX, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, text, labels, namespace=PREFIX, registry=self.registry, buckets=buckets)

    def encoded(self, done: "Done") -> None:
        """Count a block that a worker has encoded."""
        self.encoded_blocks.labels(done.engine).inc()
        self.encoded_bytes.inc(done.block.length)
        self.encoded_tokens.inc(done.receipt.tokens)
        self.shard_write.observe(done.write_seconds)

    def planned(self, plan: Plan, seconds: float, *, result: str) -> None:
        """Count a plan that was asked for; ``result`` is 'built', 'known' or 'dry_run'."""
        strategy = plan.spec.strategy
        self.plan_requests.labels(strategy, result).inc()
        self.plan_seconds.observe(seconds)
        self.plan_fill.labels(strategy).set(plan.report.fill)
        self.plan_imbalance.labels(strategy).set(plan.report.imbalance_mean)

    def failed(self, progress: Progress, kind: str, seconds: float) -> None:
        """Count a job that failed."""
        self.failures.labels(kind).inc()
        self._ended("failed", progress, seconds)

    def succeeded(self, progress: Progress, seconds: float) -> None:
        """Count a job that succeeded."""
        self._ended("succeeded", progress, seconds)

    def interrupted(self, seconds: float) -> None:
        """Count a run that ended because its job was cancelled, or the service stopped: nothing came out of it."""
        self.job_seconds.labels("interrupted").observe(seconds)

    def _ended(self, result: str, progress: Progress, seconds: float) -> None:
        self.job_seconds.labels(result).observe(seconds)
        shared = min(progress.shared, progress.hits)  # a hit that an audit takes back may have been a shared one
        self.lookups.labels("hit", "").inc(progress.hits - shared)
        self.lookups.labels("hit", "shared").inc(shared)
        for reason, count in progress.misses.items():
            self.lookups.labels("miss", reason).inc(count)
        self.rows.inc(progress.rows)
        self.tokens.inc(progress.tokens)
        self.trained_tokens.inc(progress.trained_tokens)
        self.records.inc(progress.records)
        self.source_bytes.inc(progress.bytes_done)
        for reason, count in progress.rejected.items():
            # A tokenize function of the operator's own names reasons as it likes.
            known = reason in self._reasons or len(self._reasons) < MOST_REASONS
            self._reasons |= {reason} if known else set()
            self.bad_records.labels(reason if known else "other").inc(count)


class Doing:
    """What one run of a job has done, counted as its progress tells it: each thing once, and never less."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._counted: dict[Counter, int] = {}

    def progressed(self, progress: Progress) -> None:
        """Count what is new since the last call."""
        for counter, value in self._values(progress):
            if (more := value - self._counted.get(counter, 0)) > 0:
                counter.inc(more)
                self._counted[counter] = value

    def _values(self, progress: Progress) -> Iterator[tuple[Counter, int]]:
        metrics = self._metrics
        yield metrics.read_bytes, progress.bytes_read
        yield metrics.audited_rows, progress.audited
        yield metrics.mismatches, progress.fallbacks.get("audit", 0)
        for reason, count in progress.fallbacks.items():
            yield metrics.fallbacks.labels(reason), count
