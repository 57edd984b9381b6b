"""The route and the command that explain a job, against a running service."""

import json
from pathlib import Path

import httpx
import pytest
from tests.conftest import RunningService, settled

from packhouse.client.api import Client
from packhouse.client.cli import main
from packhouse.client.errors import InvalidRequest
from packhouse.client.wire import Job, JobSpec

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"


def test_a_job_that_was_done_is_explained_as_all_hits(
    service: RunningService, tokenizer_dir: Path, tmp_path: Path
) -> None:
    source = tmp_path / "own.jsonl"  # of which no other test has made something else
    source.write_text('{"text": "done once, under one recipe"}\n')
    with Client(service.url) as client:
        spec = JobSpec(sources=[str(settled(source))], tokenizer=str(tokenizer_dir))
        done = client.wait(client.submit(spec).id)
        found = client.explain(spec)
        other = client.explain(spec.model_copy(update={"max_length": 7}))
    assert (found.hits, found.blocks, found.unscanned, found.recipe) == (1, 1, 0, done.recipe)
    (miss,) = other.misses
    assert (miss.reason, miss.recipe) == ("max_length", done.recipe)
    first = miss.changes[0]
    assert (first.field, first.old, first.new) == ("max_length", None, 7)


def test_it_answers_as_a_whole_or_line_by_line(service: RunningService, cached: Job) -> None:
    body = {"job": cached.spec.model_dump(mode="json")}
    whole = httpx.post(f"{service.url}/v1/cache/explain", json=body).json()
    headers = {"accept": "application/x-ndjson"}
    answer = httpx.post(f"{service.url}/v1/cache/explain", json=body, headers=headers)
    steps = [json.loads(line) for line in answer.text.splitlines()]
    assert [(step["looked_up"], step["done"]) for step in steps] == [(0, False), (1, False), (1, True)]
    assert steps[-1] == whole | {"seconds": steps[-1]["seconds"]}
    refused = httpx.post(f"{service.url}/v1/cache/explain", json={"job": {}}, headers=headers)
    assert (refused.status_code, refused.json()["status"]) == (422, 422)


def test_the_job_keeps_what_was_explained_before_it_ran(service: RunningService, cached: Job, texts: Path) -> None:
    spec = cached.spec.model_copy(update={"add_bos": True})
    with Client(service.url) as client:
        expected = client.explain(spec).misses
        job = client.wait(client.submit(spec).id)
        assert client.job(job.id).progress.why == expected
    assert {miss.reason: miss.blocks for miss in expected} == job.progress.misses == {"bos_id": 1}


@pytest.mark.parametrize(
    ("body", "status"),
    [({"job": {"sources": ["/none.jsonl"], "tokenizer": "/none"}}, 422), ({"job": {}}, 422), ({"limit": -1}, 422)],
)
def test_what_cannot_be_explained_is_refused(service: RunningService, body: object, status: int) -> None:
    answer = httpx.post(f"{service.url}/v1/cache/explain", json=body)
    assert answer.status_code == status
    assert answer.json()["detail"]


def test_a_wrong_job_is_an_error_of_the_request(service: RunningService, cached: Job) -> None:
    with Client(service.url) as client, pytest.raises(InvalidRequest, match="relative path"):
        client.explain(cached.spec.model_copy(update={"sources": ["a.jsonl"]}))


def test_the_command_shows_old_and_new_side_by_side_and_a_template_as_a_difference(
    service: RunningService, tokenizer_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, template = tmp_path / "chats.jsonl", tmp_path / "template"
    source.write_text(json.dumps(CHAT) + "\n")
    settled(source)
    common = [str(source), "--tokenizer", str(tokenizer_dir), "--url", service.url]
    template.write_text(TEMPLATE)
    assert main(["explain", *common, "--template", str(template)]) == 0
    assert (
        f"1 sources ({source.stat().st_size} B) are new or have changed: --scan reads them" in capsys.readouterr().out
    )
    assert main(["submit", *common, "--template", str(template), "--loss", "all"]) == 0
    template.write_text(TEMPLATE.replace("{% for", "{# a remark #}\n{% for"))
    arguments = ["explain", *common, "--scan", "--template", str(template), "--loss", "all", "--max-length", "9"]
    capsys.readouterr()
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "0 of 1 blocks are hits" in shown
    assert "template: 1 blocks" in shown
    assert "+{# a remark #}" in shown
    assert "max_length: null → 9" in shown
    assert f"{source}: 0 of 1 hits (template 1)" in shown
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["misses"][0]["changes"][0]["field"] == "template"
