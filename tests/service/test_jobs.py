"""Jobs over REST: single flight, order, cancelling, events, quarantine."""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from packhouse.client.api import Client, JobFailed
from packhouse.client.errors import PackhouseError
from packhouse.client.wire import Job, JobSpec, JobState
from packhouse.worker.executor import Executor

Start = Callable[..., Any]


@pytest.fixture
def busy(executor: Executor, tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Keep all workers busy; the value ends that."""
    flag = tmp_path / "busy"
    flag.touch()
    wait = ["sh", "-c", f"while [ -e {flag} ]; do sleep 0.05; done"]
    tasks = [executor.submit(subprocess.call, wait) for _ in range(executor.cpus)]
    yield lambda: flag.unlink(missing_ok=True)
    flag.unlink(missing_ok=True)
    for task in tasks:
        assert executor.result(task) == 0


def spec(tmp_path: Path, tokenizer_dir: Path, number: int = 0, **changes: Any) -> JobSpec:
    file = tmp_path / f"{number}.jsonl"
    file.write_text("".join(json.dumps({"text": f"file {number} text {n}"}) + "\n" for n in range(50)))
    return JobSpec(sources=[str(file)], tokenizer=str(tokenizer_dir), **changes)


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@contextmanager
def events(url: str, job: Job, last: int | None = None) -> Iterator[Iterator[tuple[int, Job]]]:
    headers = {} if last is None else {"last-event-id": str(last)}
    with httpx.stream("GET", f"{url}/v1/jobs/{job.id}/events", headers=headers, timeout=20) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield _events(response.iter_lines())


def _events(lines: Iterator[str]) -> Iterator[tuple[int, Job]]:
    number = 0
    for line in lines:
        name, _, value = line.partition(": ")
        if name == "id":
            number = int(value)
        elif name == "data":
            yield number, Job.model_validate_json(value)


def test_an_identical_active_job_is_returned(
    start_service: Start, busy: Callable[[], None], tmp_path: Path, tokenizer_dir: Path
) -> None:
    one = spec(tmp_path, tokenizer_dir)
    with start_service(tmp_path) as service, httpx.Client(base_url=service.url) as http:
        answers = [http.post("/v1/jobs", json=one.model_dump(mode="json") | {"name": name}) for name in ("a", "b")]
        other = http.post("/v1/jobs", json=one.model_dump(mode="json") | {"max_length": 7})
        assert [answer.status_code for answer in (*answers, other)] == [202, 200, 202]
        assert answers[0].json()["id"] == answers[1].json()["id"] != other.json()["id"]
        assert answers[0].headers["location"] == f"/v1/jobs/{answers[0].json()['id']}"
        busy()
        with Client(service.url) as client:
            client.wait(answers[0].json()["id"])
        assert http.post("/v1/jobs", json=one.model_dump(mode="json")).status_code == 202


def test_many_identical_submits_at_once_make_one_job(
    start_service: Start, busy: Callable[[], None], tmp_path: Path, tokenizer_dir: Path
) -> None:
    one = spec(tmp_path, tokenizer_dir)
    ids: list[str] = []
    with start_service(tmp_path) as service:

        def submit() -> None:
            with Client(service.url) as client:
                ids.append(client.submit(one).id)

        threads = [threading.Thread(target=submit) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(ids) == 16
        assert len(set(ids)) == 1


def test_cancel_queued_running_and_finished(
    start_service: Start, busy: Callable[[], None], tmp_path: Path, tokenizer_dir: Path
) -> None:
    """Case B086."""
    with start_service(tmp_path, jobs_at_once=1) as service, Client(service.url) as client:
        running, queued, after = (client.submit(spec(tmp_path, tokenizer_dir, number)) for number in range(3))
        until(lambda: client.job(running.id).state is JobState.RUNNING)
        assert client.job(queued.id).state is JobState.QUEUED

        cancelled = client.cancel(queued.id)
        assert (cancelled.state, cancelled.started_at) == (JobState.CANCELLED, None)
        client.cancel(running.id)
        with pytest.raises(JobFailed, match="cancelled"):
            client.wait(running.id)

        busy()
        finished = client.wait(after.id)
        assert client.job(queued.id).started_at is None
        for job in (finished, cancelled):
            with pytest.raises(PackhouseError, match=f"is {job.state} already") as caught:
                client.cancel(job.id)
            assert (caught.value.kind, caught.value.status) == ("conflict", 409)
        assert not list((tmp_path / "store" / "tmp").glob("*"))
        assert [job.id for job in client.jobs(JobState.CANCELLED)] == [queued.id, running.id]


def test_jobs_run_in_the_order_they_came(start_service: Start, tmp_path: Path, tokenizer_dir: Path) -> None:
    with start_service(tmp_path, jobs_at_once=1) as service, Client(service.url) as client:
        jobs = [client.submit(spec(tmp_path, tokenizer_dir, number)) for number in range(4)]
        started = [client.wait(job.id).started_at for job in jobs]
        assert None not in started
        assert started == sorted(started, key=str)


def test_events_go_on_after_the_last_that_was_seen(
    start_service: Start, busy: Callable[[], None], tmp_path: Path, tokenizer_dir: Path
) -> None:
    with start_service(tmp_path, heartbeat=0.1) as service, Client(service.url) as client:
        job = client.submit(spec(tmp_path, tokenizer_dir))
        until(lambda: client.job(job.id).progress.phase == "scanning")
        with events(service.url, job) as stream:
            seen, snapshot = next(stream)
            assert seen == snapshot.version
        client.cancel(job.id)
        with events(service.url, job, seen) as stream:
            rest = list(stream)
        assert [number for number, _ in rest] == sorted({number for number, _ in rest})
        assert rest[0][0] > seen
        assert [one.state.final for _, one in rest].index(True) == len(rest) - 1
        last = {"last-event-id": str(rest[-1][0])}
        assert httpx.get(f"{service.url}/v1/jobs/{job.id}/events", headers=last).status_code == 204


def test_a_heartbeat_comes_while_nothing_happens(
    start_service: Start, busy: Callable[[], None], tmp_path: Path, tokenizer_dir: Path
) -> None:
    with start_service(tmp_path, heartbeat=0.1, jobs_at_once=1) as service, Client(service.url) as client:
        client.submit(spec(tmp_path, tokenizer_dir, 0))
        waiting = client.submit(spec(tmp_path, tokenizer_dir, 1))
        with httpx.stream("GET", f"{service.url}/v1/jobs/{waiting.id}/events") as response:
            assert any(line.startswith(":") for line in response.iter_lines())


def test_readers_that_go_away_leave_nothing_behind(
    start_service: Start, busy: Callable[[], None], tmp_path: Path, tokenizer_dir: Path
) -> None:
    with start_service(tmp_path) as service, Client(service.url) as client:
        job = client.submit(spec(tmp_path, tokenizer_dir))
        with httpx.Client(base_url=service.url, limits=httpx.Limits(max_connections=None)) as http:
            streams = [http.stream("GET", f"/v1/jobs/{job.id}/events") for _ in range(50)]
            bodies = [stream.__enter__().iter_raw() for stream in streams]
            for body in bodies:
                next(body)
            until(lambda: service.jobs.listeners == 50)
            for stream in streams:
                stream.__exit__(None, None, None)
            until(lambda: service.jobs.listeners == 0, seconds=10)


def test_rejected_records_are_found_and_never_shown(service: Any, cached: Job, texts: Path) -> None:
    with Client(service.url) as client:
        (record,) = client.rejected(cached.id)
    lines = texts.read_bytes().split(b"\n")
    assert (record.source, record.line, record.reason) == (str(texts), 201, "invalid_json")
    assert texts.read_bytes()[record.offset : record.offset + record.length] == lines[200]
    assert "not json" not in record.detail
    assert cached.progress.rejected == {"invalid_json": 1}


def test_rejected_records_come_in_pages(start_service: Start, tmp_path: Path, tokenizer_dir: Path) -> None:
    for name, bad in (("a", 3), ("b", 4)):
        good = "".join(json.dumps({"text": f"{name} {n}"}) + "\n" for n in range(5))
        (tmp_path / f"{name}.jsonl").write_text(good + f"{name}\n" * bad)
    sources = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    one = JobSpec(sources=sources, tokenizer=str(tokenizer_dir), max_bad_share=1)
    with start_service(tmp_path) as service, Client(service.url) as client:
        job = client.wait(client.submit(one).id)
        all_of_them = list(client.rejected(job.id))
        assert [(record.source[-7], record.line) for record in all_of_them] == [
            *(("a", line) for line in (6, 7, 8)),
            *(("b", line) for line in (6, 7, 8, 9)),
        ]
        page = httpx.get(f"{service.url}/v1/jobs/{job.id}/rejected?offset=2&limit=2")
        assert page.json() == [record.model_dump() for record in all_of_them[2:4]]
        assert page.links["next"]["url"] == f"/v1/jobs/{job.id}/rejected?offset=4&limit=2"


def test_a_failed_job_says_why(start_service: Start, tmp_path: Path, tokenizer_dir: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("no\n" * 10)
    one = JobSpec(sources=[str(tmp_path / "bad.jsonl")], tokenizer=str(tokenizer_dir))
    with start_service(tmp_path) as service, Client(service.url) as client:
        job = client.submit(one)
        with pytest.raises(JobFailed, match="10 of 10 records") as caught:
            client.wait(job.id)
        assert caught.value.remedy
        failed = client.job(job.id)
        assert failed.error is not None
        assert failed.progress.rejected == {"invalid_json": 10}


def test_a_job_that_fails_by_bad_records_lists_them(service: Any, tmp_path: Path, tokenizer_dir: Path) -> None:
    source = tmp_path / "bad.jsonl"
    source.write_text('{"text": "a"}\n{"txt": "b"}\nnot json\n')
    with Client(service.url) as client:
        job = client.submit(JobSpec(sources=[str(source)], tokenizer=str(tokenizer_dir)))
        with pytest.raises(JobFailed, match="2 of 3 records cannot be used"):
            client.wait(job.id)
        found = [(record.line, record.reason) for record in client.rejected(job.id)]
    assert found == [(2, "missing_field"), (3, "invalid_json")]


def test_a_warning_of_the_recipe_stands_in_the_job(service: Any, texts: Path, tokenizer_dir: Path) -> None:
    template = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<eoa>' }}{% endfor %}"
    with Client(service.url) as client:
        spec = JobSpec(sources=[str(texts)], tokenizer=str(tokenizer_dir), kind="chat", template=template)
        (warning,) = client.submit(spec).warnings
    assert "'<eoa>', which is not a token of its own" in warning


def test_b091_what_is_told_of_no_rows_is_json(service: Any, tmp_path: Path, tokenizer_dir: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{\n")
    asked = JobSpec(sources=[str(tmp_path)], tokenizer=str(tokenizer_dir), kind="text", format="text", max_bad_share=1)

    def strict(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    with Client(service.url) as client:
        job = client.wait(client.submit(asked).id)
    assert (job.progress.rows, job.progress.rejected) == (0, {"invalid_json": 1})
    for path in (f"/jobs/{job.id}", f"/datasets/{job.dataset}", f"/datasets/{job.dataset}/manifest", "/cache"):
        answer = httpx.get(f"{service.url}/v1{path}")
        assert answer.status_code == 200, path
        json.loads(answer.text, parse_constant=strict)
        page = httpx.get(f"{service.url}{path}") if path.count("/") == 2 else None
        assert page is None or (page.status_code, "nan" in page.text.lower().split()) == (200, False), path
    for strategy in ("none", "best_fit", "balanced", "hard"):
        plan = {"datasets": [job.dataset], "pack_length": 64, "strategy": strategy}
        answer = httpx.post(f"{service.url}/v1/plans", json=plan, timeout=30)
        assert (answer.status_code, "none of the 0 samples" in answer.json()["detail"]) == (422, True), answer.text


def test_an_empty_source_gives_no_rows_and_a_warning(service: Any, tmp_path: Path, tokenizer_dir: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with Client(service.url) as client:
        job = client.wait(client.submit(JobSpec(sources=[str(tmp_path)], tokenizer=str(tokenizer_dir))).id)
    assert job.progress.rows == 0
    assert job.warnings == [f"the source '{tmp_path}/empty.jsonl' is empty"]


@pytest.mark.parametrize("last", ["x", "-1", "9" * 5000])
def test_an_event_id_that_was_never_given_is_as_good_as_none(service: Any, cached: Job, last: str) -> None:
    headers = {"last-event-id": last}
    answer = httpx.get(f"{service.url}/v1/jobs/{cached.id}/events", headers=headers)
    assert answer.status_code == 200
    assert '"state":"succeeded"' in answer.text
