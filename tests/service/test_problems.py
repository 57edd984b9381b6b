"""Bad requests: each is answered quickly with a problem document that says the fact, the value and the remedy."""

import json
import time
from typing import Any

import httpx
import pytest

NOTHING = "0" * 32


@pytest.fixture
def http(service: Any) -> Any:
    with httpx.Client(base_url=service.url, trust_env=False) as client:
        yield client


def body(tokenizer_dir: Any, texts: Any, **changes: Any) -> dict[str, Any]:
    return {"sources": [str(texts)], "tokenizer": str(tokenizer_dir), **changes}


def check(response: httpx.Response, status: int, kind: str, *words: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert problem["status"] == status
    assert problem["type"] == f"urn:packhouse:problem:{kind}"
    assert problem["remedy"]
    for word in words:
        assert word in problem["detail"]
    return problem


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sources": ["/nowhere/x.jsonl"]}, ["/nowhere/x.jsonl", "No such file"]),
        ({"sources": ["x.jsonl"]}, ["'x.jsonl'", "relative"]),
        ({"sources": ["/dev/null"]}, ["/dev/null", "not a regular file"]),
        ({"sources": ["file:///etc/passwd"]}, ["an address that begins with 'file'"]),
        ({"sources": ["/nowhere/*.jsonl"]}, ["matches no"]),
        ({"sources": ["/x\0y"]}, ["zero byte"]),
        ({"sources": []}, ["body.sources", "at least 1"]),
        ({"sources": "/x"}, ["body.sources", "list"]),
        ({"tokenizer": "/nowhere"}, ["/nowhere", "not a folder"]),
        ({"tokenizer": "gpt2"}, ["'gpt2'", "not a folder"]),
        ({"tokenizer": "/usr"}, ["/usr", "tokenizer.json"]),
        ({"kind": "images"}, ["body.kind", "images"]),
        ({"max_length": 0}, ["body.max_length", "0"]),
        ({"max_length": True}, ["body.max_length", "integer"]),
        ({"max_length": "9"}, ["body.max_length", "integer"]),
        ({"max_bad_share": 2}, ["body.max_bad_share", "2"]),
        ({"wokenizer": 1}, ["body.wokenizer", "not permitted"]),
        ({"loss": "assistant"}, ["loss 'assistant'"]),
    ],
)
def test_bad_jobs_are_refused_at_once(
    http: httpx.Client, tokenizer_dir: Any, texts: Any, changes: dict[str, Any], words: list[str]
) -> None:
    begun = time.monotonic()
    response = http.post("/v1/jobs", json=body(tokenizer_dir, texts, **changes))
    assert time.monotonic() - begun < 10  # before any job would run
    check(response, 422, "invalid-request", *words)


def test_a_broken_tokenizer_is_refused(http: httpx.Client, tmp_path: Any, texts: Any) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    problem = check(http.post("/v1/jobs", json=body(tmp_path, texts)), 422, "invalid-request", "cannot be loaded")
    assert "Traceback" not in problem["detail"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"sources": ["/x"], "tokenizer": "/t", "max_length": NaN}', ["body.max_length", "nan"]),
        (b'{"sources": ["/x"], "tokenizer": "/t", "max_bad_share": Infinity}', ["body.max_bad_share", "inf"]),
        (b'{"sources": ["/\\ud800"], "tokenizer": "/t"}', ["not JSON in UTF-8"]),
        (b'{"sources": ["/\xff"], "tokenizer": "/t"}', ["not JSON in UTF-8"]),
        (b'{"sources": ["/x"', ["not JSON in UTF-8", "EOF"]),
        (b"[" * 100_000, ["not JSON in UTF-8", "recursion"]),
        (b"[]", ["body"]),
        (b"", ["body", "required"]),
    ],
)
def test_bad_bodies(http: httpx.Client, content: bytes, words: list[str]) -> None:
    """Case B091 among them: NaN and Infinity are no JSON that is taken."""
    response = http.post("/v1/jobs", content=content, headers={"content-type": "application/json"})
    check(response, 422, "invalid-request", *words)


def test_a_body_must_say_that_it_is_json(http: httpx.Client) -> None:
    check(http.post("/v1/jobs", content=b"{}"), 422, "invalid-request", "content-type: application/json")


@pytest.mark.parametrize("chunked", [False, True])
def test_long_bodies_are_not_read(http: httpx.Client, chunked: bool) -> None:
    data = json.dumps({"sources": ["x" * (9 << 20)]}).encode()
    content: Any = iter([data[: 1 << 20], data[1 << 20 :]]) if chunked else data
    response = http.post("/v1/jobs", content=content, headers={"content-type": "application/json"})
    check(response, 413, "too-large", "8,388,608")


@pytest.mark.parametrize(
    ("method", "path", "status", "kind", "words"),
    [
        ("GET", "/nothing", 404, "not-found", ["/nothing"]),
        ("PUT", "/v1/jobs", 405, "method-not-allowed", ["PUT"]),
        ("GET", "/v1/jobs/nothing", 404, "not-found", ["'nothing'"]),
        ("GET", "/v1/jobs/nothing/events", 404, "not-found", ["'nothing'"]),
        ("GET", "/v1/jobs/nothing/rejected", 404, "not-found", ["'nothing'"]),
        ("DELETE", "/v1/jobs/nothing", 404, "not-found", ["'nothing'"]),
        ("GET", "/v1/jobs/..%2f..%2fetc%2fpasswd", 404, "not-found", []),
        ("GET", "/v1/jobs?limit=0", 422, "invalid-request", ["query.limit"]),
        ("GET", "/v1/jobs?state=odd", 422, "invalid-request", ["query.state", "odd"]),
        ("GET", "/v1/jobs?colour=red", 422, "invalid-request", ["query.colour"]),
        ("POST", "/v1/jobs?colour=red", 422, "invalid-request", ["query.colour"]),
        ("GET", f"/v1/datasets/{NOTHING}", 404, "not-found", [NOTHING]),
        ("GET", f"/v1/datasets/{NOTHING}/meta", 404, "not-found", [NOTHING]),
        ("GET", "/v1/datasets/..%2f..%2fx", 404, "not-found", []),
        ("GET", "/v1/datasets/../../x", 404, "not-found", []),
        ("GET", f"/v1/plans/{NOTHING}", 404, "not-found", [NOTHING]),
        ("GET", f"/v1/plans/{NOTHING}/steps?world=0", 422, "invalid-request", ["query.world"]),
        ("GET", f"/v1/shards/{NOTHING}", 404, "not-found", [NOTHING]),
        ("GET", "/v1/shards/..", 404, "not-found", []),
        ("GET", "/v1/shards/passwd/meta", 404, "not-found", ["'passwd'"]),
    ],
)
def test_bad_addresses(http: httpx.Client, method: str, path: str, status: int, kind: str, words: list[str]) -> None:
    check(http.request(method, path), status, kind, *words)


@pytest.mark.parametrize(
    ("changes", "status", "kind", "words"),
    [
        ({"datasets": [NOTHING]}, 404, "not-found", [NOTHING]),
        ({"datasets": ["../../x"]}, 404, "not-found", ["../../x"]),
        ({"datasets": []}, 422, "invalid-request", ["body.datasets"]),
        ({"datasets": [NOTHING] * 10_001}, 422, "invalid-request", ["body.datasets", "at most 10000"]),
        ({"pack_length": 0}, 422, "invalid-request", ["body.pack_length"]),
        ({"colour": 1}, 422, "invalid-request", ["body.colour"]),
        ({"seq_len": 5}, 422, "invalid-request", ["seq_len 5"]),
    ],
)
def test_bad_plans(
    http: httpx.Client, cached: Any, changes: dict[str, Any], status: int, kind: str, words: list[str]
) -> None:
    spec = {"datasets": [cached.dataset], "pack_length": 100, **changes}
    check(http.post("/v1/plans", json=spec), status, kind, *words)


def test_an_unexpected_error_shows_no_internals(
    service: Any, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(job_id: str) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(service.jobs, "job", broken)
    problem = check(http.get("/v1/jobs/x"), 500, "internal")
    assert "secret" not in json.dumps(problem)
