"""The client of the service: waiting, errors, plans and shards through the service."""

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest

from packhouse.client.api import Client, JobFailed
from packhouse.client.connection import to_error
from packhouse.client.errors import Damaged, InvalidRequest, Mismatch, NotFound, PackhouseError, Unavailable
from packhouse.client.format import META_SCHEMA, read_manifest, read_shard
from packhouse.client.plan import PlanFile
from packhouse.client.remote import HttpPlan, HttpStore
from packhouse.client.wire import Job, JobSpec, JobState, Problem
from packhouse.client.wire_plans import Plan, PlanSpec


@pytest.fixture
def client(service: Any) -> Any:
    with Client(service.url) as client:
        yield client


@pytest.fixture
def plan(client: Client, cached: Job) -> Plan:
    return client.plan(PlanSpec(datasets=[str(cached.dataset)], pack_length=256, ranks=2, micro_batches=2))


def scripted(*answers: Any) -> tuple[httpx.MockTransport, list[httpx.Request]]:
    """Return a transport that gives these answers in order (an exception is raised), and the requests it saw."""
    rest, seen = list(answers), []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        one: httpx.Response | Exception = rest.pop(0)
        if isinstance(one, Exception):
            raise one
        return one

    return httpx.MockTransport(answer), seen


def stream(*jobs: Job) -> httpx.Response:
    snapshots = "".join(f"id: {job.version}\ndata: {job.model_dump_json()}\n\n" for job in jobs)
    body = f"retry: 1000\n\n: nothing new\n\n{snapshots}"
    return httpx.Response(200, text=body, headers={"content-type": "text/event-stream"})


def test_wait_shows_progress_and_returns_the_end(client: Client, texts: Path, tokenizer_dir: Path) -> None:
    seen: list[Job] = []
    job = client.submit(JobSpec(sources=[str(texts)], tokenizer=str(tokenizer_dir), max_length=11))
    finished = client.wait(job.id, seen.append)
    assert finished.state is JobState.SUCCEEDED
    assert seen[-1] == finished == client.job(job.id)
    versions = [one.version for one in seen]
    assert versions == sorted(set(versions))
    assert finished.progress.rows == 300
    assert client.dataset(str(finished.dataset)).tokens == finished.progress.tokens


def test_wait_goes_on_where_a_broken_stream_ended(cached: Job) -> None:
    running = cached.model_copy(update={"state": JobState.RUNNING, "version": 3})
    later = running.model_copy(update={"version": 4})
    transport, seen = scripted(
        stream(running), httpx.ConnectError("down"), httpx.Response(503, text="<html>"), stream(later), stream(cached)
    )
    versions: list[int] = []
    with Client("http://service", transport=transport) as client:
        assert client.wait(cached.id, lambda job: versions.append(job.version)) == cached
    assert versions == [3, 4, cached.version]
    assert [request.headers.get("last-event-id") for request in seen] == [None, "3", "3", "3", "4"]


def test_wait_has_patience_with_an_end() -> None:
    transport, _ = scripted(*[httpx.ConnectError("down")] * 50)
    with Client("http://service", transport=transport) as client, pytest.raises(Unavailable, match="no service at"):
        client.wait("j", patience=0.3)


def test_a_failed_job_raises_its_reason(cached: Job) -> None:
    error = Problem(type="urn:x:bad-records", title="t", status=422, detail="9 of 9", remedy="mend it")
    failed = cached.model_copy(update={"state": JobState.FAILED, "error": error})
    transport, _ = scripted(stream(failed))
    with Client("http://service", transport=transport) as client, pytest.raises(JobFailed, match="9 of 9") as caught:
        client.wait(cached.id)
    assert (caught.value.job, caught.value.remedy) == (failed, "mend it")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("invalid-request", InvalidRequest),
        ("not-found", NotFound),
        ("damaged", Damaged),
        ("mismatch", Mismatch),
        ("unavailable", Unavailable),
        ("new-kind", PackhouseError),
    ],
)
def test_problems_become_errors(kind: str, error: type[PackhouseError]) -> None:
    problem = Problem(type=f"urn:packhouse:problem:{kind}", title="t", status=418, detail="the fact", remedy="do it")
    result = to_error(problem)
    assert type(result) is error
    assert (str(result), result.kind, result.status) == ("the fact: do it", kind, 418)


def test_no_service_says_how_to_start_one() -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(Unavailable) as caught:
        client.jobs()
    text = "no service at http://127.0.0.1:9: start one with 'packhouse serve', or set PACKHOUSE_URL"
    assert str(caught.value) == text


@pytest.mark.parametrize("url", ["", "127.0.0.1:7077", "ftp://x", "http://", "nonsense"])
def test_bad_urls(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKHOUSE_URL", "also nonsense")
    with pytest.raises(InvalidRequest, match="not the URL"):
        Client(url)


def test_the_url_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKHOUSE_URL", "http://elsewhere:1/")
    assert Client().connection.url == "http://elsewhere:1"
    assert Client("http://here").connection.url == "http://here"


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (httpx.Response(502, text="<html>"), Unavailable, "answered 502 without saying why"),
        (httpx.Response(404, text="<html>"), PackhouseError, "answered 404 without saying why"),
        (httpx.Response(200, text="<html>"), Mismatch, "cannot be read"),
        (httpx.Response(200, json={"id": 1}), Mismatch, "one version"),
        (httpx.ReadTimeout("slow"), Unavailable, "did not answer within 60 s"),
        (httpx.RemoteProtocolError("cut"), Unavailable, "broke"),
    ],
)
def test_answers_that_cannot_be_used(answer: Any, error: type[Exception], words: str) -> None:
    transport, _ = scripted(answer)
    with Client("http://service", transport=transport) as client, pytest.raises(error, match=words):
        client.job("j")


def test_ids_never_leave_their_path(client: Client) -> None:
    for name in ("../jobs", "a/b", "", "a?b"):
        with pytest.raises(NotFound, match="not an id"):
            client.job(name)


def test_lists_and_meta(client: Client, service: Any, cached: Job, plan: Plan) -> None:
    assert cached.dataset in [dataset.id for dataset in client.datasets()]
    assert cached in client.jobs()
    assert plan in client.plans()
    assert plan == client.plan_info(plan.id)
    meta = pa.Table.from_batches(client.meta(str(cached.dataset)))
    assert meta.schema.equals(META_SCHEMA)
    assert (meta.num_rows, sum(meta["num_tokens"].to_pylist())) == (300, cached.progress.tokens)


def test_a_dry_run_stores_nothing(client: Client, cached: Job) -> None:
    spec = PlanSpec(datasets=[str(cached.dataset)], pack_length=77)
    assert client.plan(spec, dry_run=True).stored is False
    with pytest.raises(NotFound, match="no plan"):
        client.plan_info(client.plan(spec, dry_run=True).id)


def test_a_plan_through_the_service_is_the_plan(client: Client, service: Any, plan: Plan) -> None:
    here, there = client.open_plan(plan.id, service.parts.store), client.open_plan(plan.id)
    assert isinstance(here, PlanFile)
    assert there.header == here.header
    for window in ((0, here.steps, 0, 1), (1, 3, 1, 3), (2, 2, 0, 1), (0, here.steps, 6, 7)):
        assert there.slice(*window).equals(here.slice(*window))
    batches = list(client.steps(plan.id, start=1, world=2))
    assert pa.concat_batches(batches).equals(here.slice(1, here.steps, 0, 2))
    with pytest.raises(InvalidRequest, match="rank 3"):
        there.slice(0, 1, 3, 3)
    with pytest.raises(NotFound, match="no plan"):
        _ = client.open_plan("0" * 32).header


def test_plans_and_stores_can_be_pickled(client: Client, service: Any, plan: Plan, tmp_path: Path) -> None:
    source = pickle.loads(pickle.dumps(client.open_plan(plan.id)))
    assert source.header.id == plan.id
    store = pickle.loads(pickle.dumps(client.open_store(tmp_path)))
    assert store.open(f"datasets/{plan.spec.datasets[0]}.json").size > 0


def test_shards_are_fetched_once(client: Client, service: Any, cached: Job, tmp_path: Path) -> None:
    store = client.open_store(tmp_path)
    (receipt,) = read_manifest(store, str(cached.dataset)).shards
    ours, theirs = read_shard(store, receipt), read_shard(service.parts.store, receipt)
    np.testing.assert_array_equal(ours.input_ids, theirs.input_ids)
    transport, seen = scripted()
    offline = HttpStore(Client("http://service", transport=transport).connection, tmp_path)
    np.testing.assert_array_equal(read_shard(offline, receipt).input_ids, theirs.input_ids)
    assert not seen
    assert not list((tmp_path / "tmp").glob("*"))
    with pytest.raises(NotFound, match="hands out no"):
        store.open("tokenizers/x.json")


def test_what_arrives_cut_or_altered_is_fetched_again(
    client: Client, service: Any, cached: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    path = f"datasets/{cached.dataset}.json"
    whole = client.connection.send("GET", f"/v1/datasets/{cached.dataset}/manifest")
    altered = httpx.Response(200, content=whole.content[:-1] + b" ", headers=whole.headers)
    good = httpx.Response(200, content=whole.content, headers=whole.headers)
    transport, seen = scripted(altered, httpx.RemoteProtocolError("cut"), good)
    store = HttpStore(Client("http://service", transport=transport).connection, tmp_path)
    assert bytes(store.open(path)) == whole.content
    assert len(seen) == 3
    transport, seen = scripted(*[altered] * 9)
    with pytest.raises(Damaged, match="altered or cut"):
        HttpStore(Client("http://service", transport=transport).connection, tmp_path / "other").open(path)
    assert not (tmp_path / "other" / path).exists()


def test_steps_that_are_cut_are_an_error(client: Client, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    whole = client.connection.send("GET", f"/v1/plans/{plan.id}/steps?header=false")
    for content in (whole.content[:-8], whole.content[: len(whole.content) // 2], b""):
        answer = httpx.Response(200, content=content, headers={"packhouse-digest": whole.headers["packhouse-digest"]})
        transport, _ = scripted(*[answer] * 9)
        with pytest.raises(Damaged):
            HttpPlan(Client("http://service", transport=transport).connection, plan.id).slice(0, 1, 0, 1)


def test_a_fork_does_not_share_a_socket(client: Client, plan: Plan) -> None:
    source = client.open_plan(plan.id)
    expected = source.slice(0, 1, 0, 1)
    before = client.connection._client
    results: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)  # as a forked process sees itself
        other = client.connection._client
        thread = threading.Thread(target=lambda: results.append(source.slice(0, 1, 0, 1).equals(expected)))
        thread.start()
        thread.join()
        client.connection.close()
    assert results == [True]
    assert other is not before
