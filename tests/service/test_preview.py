"""Preview over REST, from Python and from the command line; forms recognised when a job comes in."""

import gzip
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from packhouse.client.api import Client
from packhouse.client.cli import main
from packhouse.client.errors import InvalidRequest, PackhouseError
from packhouse.client.wire import JobSpec

SAID = [{"from": "human", "value": "Hi <|im_end|>"}, {"from": "gpt", "value": "Hello."}]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.json"
    path.write_text(
        json.dumps([{"conversations": SAID}, {"conversations": SAID[:1]}, {"conversations": SAID}], indent=1)
    )
    return path


def test_a_preview_shows_what_is_trained_and_what_is_kept_out(service: Any, chats: Path, tokenizer_dir: Path) -> None:
    spec = JobSpec(sources=[str(chats)], tokenizer=str(tokenizer_dir))
    with Client(service.url) as client:
        shown = client.preview(spec, records=2)
        again = client.preview(spec, records=2)
    assert (shown.form, shown.kind, shown.loss) == ("conversations", "chat", "assistant")
    assert "recognised from the first records" in shown.warnings[0]
    (sample,) = shown.samples
    assert [(piece.text, piece.trained) for piece in sample.pieces] == [
        ("<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n", False),
        ("Hello.<|im_end|>", True),
        ("\n", False),
    ]
    assert [(reject.line, reject.reason) for reject in shown.rejected] == [(2, "nothing_to_train")]
    assert again.seconds < 1


def test_the_command_shows_the_same(
    service: Any, chats: Path, tokenizer_dir: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKHOUSE_URL", service.url)
    arguments = ["preview", str(chats), "--tokenizer", str(tokenizer_dir), "--template", "chatml", "--records", "2"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "⟦Hello.<|im_end|>⟧" in printed
    assert "line 2: kept out, nothing_to_train" in printed
    assert main([*arguments, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["samples"]) == 1
    assert main([*arguments, "--field", "nonsense"]) == 2


def test_what_is_wrong_with_a_job_is_told(service: Any, chats: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:-9])
    with Client(service.url) as client:
        with pytest.raises(PackhouseError, match=r"cut\.jsonl\.gz.*Truncated"):
            client.preview(JobSpec(sources=[str(cut)], tokenizer=str(tokenizer_dir)))
        with pytest.raises(InvalidRequest, match="no built-in template"):
            client.preview(JobSpec(sources=[str(chats)], tokenizer=str(tokenizer_dir), template="lama"))
    body = {"job": {"sources": [str(chats)], "tokenizer": str(tokenizer_dir)}, "records": 1000}
    assert httpx.post(f"{service.url}/v1/preview", json=body).status_code == 422


@pytest.mark.parametrize("packed", [False, True])
def test_a_job_recognises_its_records_and_makes_what_the_stated_form_makes(
    service: Any, chats: Path, tokenizer_dir: Path, packed: bool
) -> None:
    source = chats
    if packed:
        source = chats.with_suffix(".json.gz")
        source.write_bytes(gzip.compress(chats.read_bytes()))
    common: dict[str, Any] = {"sources": [str(source)], "tokenizer": str(tokenizer_dir), "max_bad_share": 0.5}
    with Client(service.url) as client:
        seen = client.wait(client.submit(JobSpec(**common)).id)
        stated = client.wait(client.submit(JobSpec(**common, format="conversations")).id)
        assert seen.dataset == stated.dataset
        assert (seen.progress.rows, seen.progress.rejected) == (2, {"nothing_to_train": 1})
        assert client.dataset(str(seen.dataset)).recipe["record"] == "conversations"
        assert [record.line for record in client.rejected(seen.id)] == [2]
    assert "recognised" in seen.warnings[0]
    assert not any("recognised" in warning for warning in stated.warnings)
