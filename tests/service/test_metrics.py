"""Metrics: what a real service counts of real jobs, once each, and under names that cannot grow without bound."""

import re
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import create_engine, insert

from packhouse.client.api import Client, JobFailed
from packhouse.client.wire import Job, JobSpec, JobState, Progress
from packhouse.client.wire_plans import PlanSpec
from packhouse.service.catalog import Catalog
from packhouse.service.gauges import Gauges
from packhouse.service.metrics import BAD_RECORDS, MOST_REASONS, Doing, Metrics
from packhouse.service.observed import ObservedWork
from packhouse.service.tables import ShardRow, ShardState
from packhouse.worker.recipe import Recipe

Values = dict[str, float]


def scrape(url: str) -> Values:
    """Return every sample of /metrics by its name and labels, as Prometheus writes them."""
    answer = httpx.get(f"{url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return values(answer.text)


def values(text: str) -> Values:
    found: Values = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def grown(before: Values, after: Values) -> Values:
    """Return what has changed of the packhouse counters."""
    names = {name for name in after if "_total" in name or "_count" in name}
    return {name.removeprefix("packhouse_"): more for name in names if (more := after[name] - before.get(name, 0))}


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(f'{{"text": "line {number} of {tmp_path.name}"}}\n' for number in range(200)) + "bad\n")
    return file


def run(client: Client, file: Path, tokenizer: Path, **changes: Any) -> Job:
    return client.wait(client.submit(JobSpec(sources=[str(file)], tokenizer=str(tokenizer), **changes)).id)


def test_a_job_counts_once_and_its_twin_is_all_hits(service: Any, lines: Path, tokenizer_dir: Path) -> None:
    with Client(service.url) as client:
        start = scrape(service.url)
        first = run(client, lines, tokenizer_dir).progress
        middle = scrape(service.url)
        second = run(client, lines, tokenizer_dir).progress
        end = scrape(service.url)
    made, size = grown(start, middle), lines.stat().st_size
    assert made["lookups_total{reason=new_block,result=miss}"] == first.blocks == 1
    assert (made["rows_total"], made["tokens_total"]) == (first.rows, first.tokens)
    assert (made["records_total"], made["bad_records_total{reason=invalid_json}"]) == (201, 1)
    assert (made["encoded_bytes_total"], made["encoded_tokens_total"]) == (size, first.tokens)
    assert (made["read_bytes_total"], made["source_bytes_total"]) == (first.bytes_read, size)
    assert made["audited_rows_total"] == first.audited > 0
    assert made["shard_write_seconds_count"] == 1
    assert made["job_duration_seconds_count{result=succeeded}"] == 1
    again = grown(middle, end)
    assert again["lookups_total{reason=,result=hit}"] == second.hits == 1
    assert again["lookups_total{reason=,result=hit}"] == 1
    assert (again["rows_total"], again["source_bytes_total"]) == (second.rows, size)
    for name in ("encoded_bytes_total", "shard_write_seconds_count", "lookups_total{reason=new_block,result=miss}"):
        assert name not in again
    assert all(end[name] >= value for name, value in start.items() if "_total" in name)


def test_a_failed_job_counts_by_its_problem(service: Any, lines: Path, tokenizer_dir: Path) -> None:
    start = scrape(service.url)
    with Client(service.url) as client, pytest.raises(JobFailed):
        run(client, lines, tokenizer_dir, max_bad_share=0)
    made = grown(start, scrape(service.url))
    assert made["job_failures_total{kind=bad-records}"] == made["job_duration_seconds_count{result=failed}"] == 1
    assert made["bad_records_total{reason=invalid_json}"] == 1


def test_a_plan_tells_how_full_and_how_even_it_is(service: Any, cached: Job) -> None:
    start = scrape(service.url)
    with Client(service.url) as client:
        plan = client.plan(PlanSpec(datasets=[cached.dataset or ""], pack_length=512, ranks=2), dry_run=True)
    end = scrape(service.url)
    strategy = plan.spec.strategy
    assert end[f"packhouse_plan_fill_ratio{{strategy={strategy}}}"] == plan.report.fill
    assert end[f"packhouse_plan_imbalance_ratio{{strategy={strategy}}}"] == plan.report.imbalance_mean
    made = grown(start, end)
    assert made[f"plan_requests_total{{result=dry_run,strategy={strategy}}}"] == made["plan_build_seconds_count"] == 1


def test_the_gauges_tell_how_the_service_stands(service: Any, cached: Job) -> None:
    with httpx.stream("GET", f"{service.url}/v1/jobs/{cached.id}/events"):
        found = scrape(service.url)
    assert found["packhouse_jobs{state=succeeded}"] >= 1
    assert found["packhouse_jobs{state=queued}"] == found["packhouse_queue_age_seconds"] == 0
    assert found["packhouse_part_up{part=database}"] == found["packhouse_part_up{part=ray}"] == 1
    assert found["packhouse_store_free_bytes"] > 0
    assert any(name.startswith("packhouse_build_info{python=3.") for name in found)
    assert all(name.startswith("packhouse_") for name in found)


def test_queue_and_store_on_each_database(service: Any, database_url: str) -> None:
    spec = JobSpec(sources=["/a"], tokenizer="/t")
    before = datetime.now(UTC) - timedelta(hours=1)
    with closing(Catalog(database_url)) as catalog:
        for id, state, minutes in (("a", JobState.FAILED, 0), ("b", JobState.QUEUED, 0), ("c", JobState.QUEUED, 30)):
            made = before + timedelta(minutes=minutes)
            catalog.add(
                Job(id=id, state=state, spec=spec, recipe="r", version=1, progress=Progress(), created_at=made), id
            )
        states = (ShardState.PRESENT, ShardState.PRESENT, ShardState.EVICTED)
        rows = [
            {"key": state + str(number), "recipe": "r", "bytes": 10**12, "used_at": 0.0, "state": state}
            for number, state in enumerate(states)
        ]
        with catalog.engine.begin() as connection:
            connection.execute(insert(ShardRow), rows)
        parts = replace(service.parts, catalog=catalog)
        found = {(one.name, *one.labels.values()): one.value for all in Gauges(parts).collect() for one in all.samples}
    assert (found["packhouse_jobs", "queued"], found["packhouse_jobs", "failed"]) == (2, 1)
    assert found["packhouse_jobs", "running"] == 0
    assert 3600 <= found["packhouse_queue_age_seconds",] < 3700
    assert found["packhouse_store_bytes",] == 2 * 10**12


def test_the_store_is_added_up_from_the_catalog(service: Any, cached: Job) -> None:
    stored = {family.name: family.samples for family in Gauges(service.parts).collect()}["packhouse_store_bytes"]
    files = [path for path in (Path(service.parts.store.location) / "shards").rglob("*") if path.is_file()]
    with Client(service.url) as client:
        dataset = next(one for one in client.datasets() if one.id == cached.dataset)
    # Shards of jobs that failed are in the store, and not in the catalog before it is scanned again.
    assert dataset.bytes <= stored[0].value <= sum(path.stat().st_size for path in files)


def test_a_database_that_is_gone_shows_as_down(service: Any) -> None:
    class Gone:
        """A catalog whose database cannot be reached any more."""

        engine = create_engine("sqlite:////nowhere/at/all.db")

    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in Gauges(replace(service.parts, catalog=Gone())).collect()
        for sample in family.samples
    }
    assert found["packhouse_part_up", "database"] == 0
    assert found["packhouse_part_up", "ray"] == 1
    assert "packhouse_queue_age_seconds" in str(scrape(service.url))
    assert not any(name == "packhouse_jobs" for name, *_ in found)


def test_hostile_requests_make_no_new_series(service: Any) -> None:
    with httpx.Client(base_url=service.url) as http:
        for number in range(3):
            http.get(f"/wp-admin/{number}")
            http.get(f"/v1/jobs/{number}")
            http.request(f"X{number}", "/v1/jobs")
        before = set(scrape(service.url))
        for number in range(3, 40):
            assert http.get(f"/wp-admin/{number}").status_code == 404
            assert http.get(f"/v1/jobs/{number}").status_code == 404
            assert http.request(f"X{number}", "/v1/jobs").status_code == 405
            http.get(f"/v1/plans/{number}/steps", headers={"x-request-id": f"r{number}"})
            http.get(f"/v1/plans/{number}/steps?rank=-1")
        after = scrape(service.url)
    new = {name for name in set(after) - before if "steps" not in name}
    assert new == set()
    duration = "packhouse_http_request_duration_seconds_count"
    assert after[f"{duration}{{method=GET,route=unmatched,status=4xx}}"] >= 40
    assert after[f"{duration}{{method=GET,route=/v1/jobs/{{job_id}},status=4xx}}"] >= 40
    assert after[f"{duration}{{method=other,route=/v1/jobs,status=4xx}}"] >= 40


def test_answers_are_counted_in_bytes(service: Any) -> None:
    start = scrape(service.url)
    body = httpx.get(f"{service.url}/v1/datasets").content
    made = grown(start, scrape(service.url))
    assert made["http_response_bytes_total{route=/v1/datasets}"] == len(body)


def tell(progress: Iterator[Progress] | list[Progress], metrics: Metrics) -> dict[str, float]:
    doing = Doing(metrics)
    for one in progress:
        doing.progressed(one)
    names = ("audited_rows_total", "read_bytes_total", "fallbacks_total", "audit_mismatches_total")
    return {
        sample.name.removeprefix("packhouse_"): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name.removeprefix("packhouse_") in names and sample.value
    }


def test_progress_that_falls_back_and_comes_again_counts_once() -> None:
    metrics = Metrics()
    steps = [(3, 10, 0), (3, 25, 1), (2, 20, 1), (3, 40, 1), (3, 40, 1)]
    told = [
        Progress(audited=audited, bytes_read=read, fallbacks={"audit": audit} if audit else {})
        for audited, read, audit in steps
    ]
    once = {"audited_rows_total": 3, "read_bytes_total": 40, "fallbacks_total": 1, "audit_mismatches_total": 1}
    assert tell(told, metrics) == once
    assert tell(told, metrics) == {name: 2 * value for name, value in once.items()}  # another job


def test_blocks_that_an_audit_threw_away_count_as_they_came_out() -> None:
    metrics, doing = Metrics(), Doing(Metrics())
    end = Progress(blocks=6, hits=3, shared=1, misses={"audit": 2, "new_block": 1}, rows=40, tokens=90)
    for progress in (Progress(hits=5, rows=44, tokens=99), Progress(hits=3, rows=20), end):
        doing.progressed(progress)
    metrics.succeeded(end, 1.0)
    metrics.succeeded(Progress(hits=0, shared=2), 1.0)  # both were taken back
    found = values(generate_latest(metrics.registry).decode())
    lookups = {name: value for name, value in found.items() if name.startswith("packhouse_lookups_total")}
    assert sum(lookups.values()) == 6
    assert lookups["packhouse_lookups_total{reason=shared,result=hit}"] == 1
    assert lookups["packhouse_lookups_total{reason=audit,result=miss}"] == 2
    assert (found["packhouse_rows_total"], found["packhouse_tokens_total"]) == (40, 90)


def test_every_label_that_may_come_begins_at_0() -> None:
    """What the worker's sources name, is there before it happens."""
    source = "".join(path.read_text() for path in (Path(__file__).parents[2] / "worker").rglob("*.py"))
    found = values(generate_latest(Metrics().registry).decode())
    for metric, reasons in {
        "bad_records_total{reason=%s}": set(re.findall(r'BadRecord\(\s*"(\w+)"', source)),
        "fallbacks_total{reason=%s}": set(re.findall(r'fallbacks\["(\w+)"\]', source)),
        "lookups_total{reason=%s,result=miss}": {field.name for field in fields(Recipe)},
        "encoded_blocks_total{engine=%s}": set(re.findall(r'^    name = "(\w+)"', source, re.MULTILINE)),
    }.items():
        assert len(reasons) > 1
        missing = {reason for reason in reasons if found.get(f"packhouse_{metric % reason}") != 0}
        assert missing == set(), metric


def test_reasons_that_others_name_are_bounded() -> None:
    metrics = Metrics()
    for number in range(200):
        metrics.failed(Progress(rejected={f"reason {number}": 1, "reason 0": 1}), "bad-records", 1.0)
    (samples,) = (family.samples for family in metrics.registry.collect() if family.name == "packhouse_bad_records")
    counts = {sample.labels["reason"]: sample.value for sample in samples if sample.name.endswith("_total")}
    assert len(counts) == MOST_REASONS + 1
    assert counts["reason 0"] == 200
    assert counts["other"] == 399 - 200 - (MOST_REASONS - len(BAD_RECORDS) - 1)


def test_a_cancelled_run_leaves_no_rows(tmp_path: Path) -> None:
    class Work:
        """Work that is cancelled in the middle."""

        def check(self, spec: JobSpec) -> Any: ...

        def run(self, spec: JobSpec, recipe: Any, on_progress: Any, keep: Any, cancelled: Any, submitter: str) -> str:
            on_progress(Progress(phase="encoding", rows=7, hits=2, bytes_read=9))
            cancelled.set()
            raise RuntimeError("interrupted")

    class Recipe:
        digest = "0" * 32

    metrics, stop = Metrics(), threading.Event()
    with pytest.raises(RuntimeError):
        ObservedWork(Work(), metrics).run(
            JobSpec(sources=["/a"], tokenizer="/t"),
            Recipe(),  # type: ignore[arg-type]
            lambda progress: None,
            lambda blocks: None,
            stop,
            "ann",
        )
    found: dict[str, float] = {}
    for sample in (sample for family in metrics.registry.collect() for sample in family.samples):
        found[sample.name] = found.get(sample.name, 0) + sample.value
    assert found["packhouse_read_bytes_total"] == 9
    assert found["packhouse_rows_total"] == found["packhouse_lookups_total"] == 0
    assert found["packhouse_job_failures_total"] == 0
