"""What is stored, over REST: datasets, shards with ranges, plans and their steps."""

import io
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest

from packhouse.client.digest import digest_bytes
from packhouse.client.format import META_SCHEMA, data_path, meta_path, read_manifest, read_meta
from packhouse.client.plan import METADATA_KEY, STEPS_SCHEMA, PlanFile, PlanHeader, decode_steps
from packhouse.client.wire import Job
from packhouse.client.wire_plans import Plan


@pytest.fixture
def http(service: Any) -> Any:
    with httpx.Client(base_url=service.url, trust_env=False) as client:
        yield client


@pytest.fixture
def plan(http: httpx.Client, cached: Job) -> Plan:
    spec = {"datasets": [cached.dataset], "pack_length": 512, "ranks": 4, "micro_batches": 2}
    return Plan.model_validate_json(http.post("/v1/plans", json=spec).content)


def table(response: httpx.Response) -> pa.Table:
    assert response.headers["content-type"] == "application/vnd.apache.arrow.stream"
    assert response.headers["packhouse-digest"] == digest_bytes(response.content)
    assert response.headers["etag"] == f'"{digest_bytes(response.content)}"'
    return pa.ipc.open_stream(io.BytesIO(response.content)).read_all()


def test_a_dataset_and_its_list(http: httpx.Client, service: Any, cached: Job) -> None:
    manifest = read_manifest(service.parts.store, str(cached.dataset))
    one = http.get(f"/v1/datasets/{cached.dataset}").json()
    assert (one["id"], one["rows"], one["tokens"]) == (cached.dataset, 300, manifest.tokens)
    assert one in http.get("/v1/datasets").json()
    page = http.get("/v1/datasets?limit=1")
    assert len(page.json()) == 1
    after = page.json()[0]["id"]
    assert page.links["next"]["url"] == f"/v1/datasets?limit=1&after={after}"


def test_meta_as_an_arrow_stream(http: httpx.Client, service: Any, cached: Job) -> None:
    manifest = read_manifest(service.parts.store, str(cached.dataset))
    whole = pa.Table.from_batches([read_meta(service.parts.store, shard) for shard in manifest.shards])
    assert table(http.get(f"/v1/datasets/{cached.dataset}/meta")).equals(whole)
    part = table(http.get(f"/v1/datasets/{cached.dataset}/meta?offset=290&limit=5"))
    assert part.schema.equals(META_SCHEMA)
    assert part.equals(whole.slice(290, 5))


def test_meta_as_json_pages(http: httpx.Client, service: Any, cached: Job) -> None:
    rows: list[dict[str, int]] = []
    path: str | None = f"/v1/datasets/{cached.dataset}/meta?limit=70"
    while path:
        answer = http.get(path, headers={"accept": "application/json"})
        rows += answer.json()
        path = answer.links.get("next", {}).get("url")
    assert rows == table(http.get(f"/v1/datasets/{cached.dataset}/meta")).to_pylist()


def test_an_unchanged_stream_is_not_sent_again(http: httpx.Client, cached: Job) -> None:
    path = f"/v1/datasets/{cached.dataset}/meta"
    tag = http.get(path).headers["etag"]
    again = http.get(path, headers={"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    ("wanted", "part"),
    [
        ("bytes=0-9", slice(0, 10)),
        ("bytes=100-", slice(100, None)),
        ("bytes=-7", slice(-7, None)),
        ("bytes=5-5", slice(5, 6)),
        ("bytes=10-99999999", slice(10, None)),
        ("bytes=-99999999", slice(0, None)),
    ],
)
@pytest.mark.parametrize("meta", [False, True])
def test_shard_ranges(http: httpx.Client, service: Any, cached: Job, wanted: str, part: slice, meta: bool) -> None:
    (shard,) = read_manifest(service.parts.store, str(cached.dataset)).shards
    data = bytes(service.parts.store.open(meta_path(shard.key) if meta else data_path(shard.key)))
    path = f"/v1/shards/{shard.key}" + ("/meta" if meta else "")
    answer = http.get(path, headers={"range": wanted})
    assert (answer.status_code, answer.content) == (206, data[part])
    first, last = range(len(data))[part][0], range(len(data))[part][-1]
    assert answer.headers["content-range"] == f"bytes {first}-{last}/{len(data)}"
    assert answer.headers["etag"] == f'"{digest_bytes(data)}"'


@pytest.mark.parametrize("wanted", ["bytes=99999999-", "bytes=9-3", "bytes=-0"])
def test_ranges_without_a_byte(http: httpx.Client, service: Any, cached: Job, wanted: str) -> None:
    (shard,) = read_manifest(service.parts.store, str(cached.dataset)).shards
    answer = http.get(f"/v1/shards/{shard.key}", headers={"range": wanted})
    assert answer.status_code == 416
    assert answer.headers["content-range"] == f"bytes */{shard.data.bytes}"
    assert answer.headers["content-type"] == "application/problem+json"


def test_whole_shards(http: httpx.Client, service: Any, cached: Job) -> None:
    (shard,) = read_manifest(service.parts.store, str(cached.dataset)).shards
    path = f"/v1/shards/{shard.key}"
    for headers in ({}, {"range": "lines=1-2"}, {"range": "bytes=0-1,4-5"}, {"range": "bytes=0-1", "if-range": '"x"'}):
        answer = http.get(path, headers=headers)
        assert (answer.status_code, digest_bytes(answer.content)) == (200, shard.data.digest)
    head = http.head(path)
    assert (head.status_code, head.headers["content-length"], head.content) == (200, str(shard.data.bytes), b"")
    assert http.get(path, headers={"if-none-match": head.headers["etag"]}).status_code == 304


def test_a_cut_shard_is_an_error(start_service: Any, tmp_path: Path, tokenizer_dir: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "some words"}))
    spec = {"sources": [str(tmp_path / "a.jsonl")], "tokenizer": str(tokenizer_dir)}
    with start_service(tmp_path) as service, httpx.Client(base_url=service.url) as http:
        job = http.post("/v1/jobs", json=spec).json()
        http.get(f"/v1/jobs/{job['id']}/events")
        dataset = http.get(f"/v1/jobs/{job['id']}").json()["dataset"]
        (shard,) = read_manifest(service.parts.store, dataset).shards
        for path, address in ((data_path, ""), (meta_path, "/meta")):
            file = service.parts.store.path(path(shard.key))
            file.write_bytes(file.read_bytes()[:-1])
            answer = http.get(f"/v1/shards/{shard.key}{address}")
            assert (answer.status_code, answer.json()["type"]) == (500, "urn:packhouse:problem:damaged")
        answer = http.get(f"/v1/datasets/{dataset}/meta")
        assert (answer.status_code, answer.json()["type"]) == (500, "urn:packhouse:problem:damaged")


def test_a_plan_is_made_once(http: httpx.Client, cached: Job) -> None:
    spec = {"datasets": [cached.dataset], "pack_length": 333}
    dry = http.post("/v1/plans?dry_run=true", json=spec)
    assert (dry.status_code, dry.json()["stored"]) == (200, False)
    assert http.get(f"/v1/plans/{dry.json()['id']}").status_code == 404
    first, second = (http.post("/v1/plans", json=spec) for _ in range(2))
    assert (first.status_code, second.status_code) == (201, 200)
    assert first.json() == second.json() == dry.json() | {"stored": True}
    assert first.headers["location"] == f"/v1/plans/{first.json()['id']}"
    assert http.get(first.headers["location"]).json() == first.json()
    assert http.get(first.headers["location"] + "/report").json() == first.json()["report"]
    assert first.json() in http.get("/v1/plans").json()


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8, 11])
def test_over_all_ranks_the_steps_are_the_plan(http: httpx.Client, service: Any, plan: Plan, world: int) -> None:
    whole = PlanFile.open(service.parts.store, plan.id)
    ranks = [
        decode_steps(
            table(http.get(f"/v1/plans/{plan.id}/steps?rank={r}&world={world}")).combine_chunks().to_batches()[0]
        )
        for r in range(world)
    ]
    assert len({len(rank.step) for rank in ranks}) == 1
    for step in range(whole.steps):
        slots = np.concatenate([rank.slot[rank.step == step] for rank in ranks])
        assert slots[slots >= 0].tolist() == list(range(8))
    tokens = sum(int(rank.packs.tokens.sum()) for rank in ranks)
    assert tokens == plan.report.tokens


def test_a_window_of_steps_carries_the_header(http: httpx.Client, service: Any, plan: Plan) -> None:
    whole = PlanFile.open(service.parts.store, plan.id)
    window = table(http.get(f"/v1/plans/{plan.id}/steps?start=1&stop=3&rank=1&world=2"))
    assert window.combine_chunks().to_batches()[0].equals(whole.slice(1, 3, 1, 2))
    assert PlanHeader.from_json(json.loads(window.schema.metadata[METADATA_KEY])) == whole.header
    bare = table(http.get(f"/v1/plans/{plan.id}/steps?start=1&stop=1&header=false"))
    assert not bare.schema.metadata
    assert (bare.num_rows, bare.schema) == (0, STEPS_SCHEMA)


def test_health(http: httpx.Client) -> None:
    assert http.get("/livez").json() == {"status": "alive"}
    assert http.get("/readyz").json() == {"status": "ready"}


def test_not_ready_says_why(service: Any, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(service.parts.executor), "healthy", lambda self: False)
    answer = http.get("/readyz")
    assert (answer.status_code, answer.json()["detail"]) == (503, "Ray does not answer")
    assert http.get("/livez").status_code == 200
