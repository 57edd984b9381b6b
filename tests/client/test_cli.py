"""The command line: exit codes, JSON, tables and what users are told."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from packhouse.client import cli
from packhouse.client.api import Client
from packhouse.client.cli import main
from packhouse.client.wire import Job

Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def address(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKHOUSE_URL", service.url)
    monkeypatch.setenv("NO_COLOR", "1")


def answer(capsys: Output, *arguments: str, code: int = 0) -> Any:
    """Run a command with --json; return what it printed."""
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_submit_waits_and_tells(capsys: Output, texts: Path, tokenizer_dir: Path) -> None:
    assert main(["submit", str(texts), "--tokenizer", str(tokenizer_dir), "--name", "mine"]) == 0
    printed = capsys.readouterr()
    assert "succeeded" in printed.out
    assert "invalid_json 1" in printed.out
    assert "packhouse jobs rejected" in printed.out
    assert printed.err.startswith("job ")


def test_relative_paths_are_the_callers(
    capsys: Output, texts: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(texts.parent)
    tokenizer = os.path.relpath(tokenizer_dir)
    job = answer(capsys, "submit", texts.name, "*.jsonl", "--tokenizer", tokenizer)
    assert job["spec"]["sources"] == [str(texts), str(texts.parent / "*.jsonl")]
    assert job["spec"]["tokenizer"] == str(tokenizer_dir)
    assert job["progress"]["rows"] == 600


def test_every_command_prints_only_json(capsys: Output, cached: Job, texts: Path) -> None:
    assert cached.id in [job["id"] for job in answer(capsys, "jobs")]
    assert answer(capsys, "jobs", "show", cached.id)["dataset"] == cached.dataset
    assert answer(capsys, "jobs", "wait", cached.id)["state"] == "succeeded"
    assert [record["line"] for record in answer(capsys, "jobs", "rejected", cached.id)] == [201]
    assert cached.dataset in [one["id"] for one in answer(capsys, "datasets")]
    dry = answer(capsys, "plan", str(cached.dataset), "--pack-length", "128", "--seed", "-1", "--dry-run")
    assert (dry["stored"], dry["spec"]["seed"]) == (False, None)
    assert answer(capsys, "plan", str(cached.dataset), "--pack-length", "128", "--ranks", "2")["stored"] is True


def test_tables_for_people(capsys: Output, cached: Job) -> None:
    for arguments, words in (
        (["jobs"], [cached.id, "succeeded"]),
        (["jobs", "show", cached.id], ["300 of 301 records"]),
        (["jobs", "rejected", cached.id], ["invalid_json", "201"]),
        (["datasets"], [str(cached.dataset), "text"]),
        (["plan", str(cached.dataset), "--pack-length", "128"], ["padding", "imbalance", "best_fit"]),
    ):
        assert main(arguments) == 0
        printed = capsys.readouterr().out
        for word in words:
            assert word in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["submit", "/nowhere.jsonl", "--tokenizer", "/nowhere"], "No such file"),
        (["submit", "/x"], "--tokenizer"),
        (["submit", "/x", "--tokenizer", "/t", "--kind", "odd"], "odd"),
        (["submit", "/x", "--tokenizer", "/t", "--max-bad-share", "nan"], "max_bad_share"),
        (["submit", "/x", "--tokenizer", "/t", "--template", "/nowhere"], "'/nowhere' cannot be read"),
        (["jobs", "show", "0123"], "no job '0123'"),
        (["jobs", "show", "../x"], "not an id"),
        (["jobs", "--state", "odd"], "odd"),
        (["plan", "0" * 32, "--pack-length", "5"], "no dataset"),
        (["plan", "0" * 32, "--pack-length", "0"], "pack_length"),
        (["jobs", "--url", "nonsense"], "not the URL of a service"),
        (["nonsense"], "nonsense"),
    ],
)
def test_bad_requests_exit_with_2(capsys: Output, arguments: list[str], words: str) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert not printed.out
    assert "Traceback" not in printed.err


def test_a_finished_job_cannot_be_cancelled(capsys: Output, cached: Job) -> None:
    assert answer(capsys, "jobs", "cancel", cached.id, code=2)["type"] == "conflict"


def test_a_failed_job_exits_with_1(capsys: Output, tmp_path: Path, tokenizer_dir: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("no\n" * 3)
    command = ["submit", str(tmp_path / "bad.jsonl"), "--tokenizer", str(tokenizer_dir)]
    assert main(command) == 1
    assert "3 of 3 records" in capsys.readouterr().err
    job = answer(capsys, *command, code=1)
    assert (job["state"], job["error"]["status"]) == ("failed", 422)


def test_no_service_exits_with_3(capsys: Output) -> None:
    assert main(["jobs", "--url", "http://127.0.0.1:9"]) == 3
    assert "start one with 'packhouse serve'" in capsys.readouterr().err


def test_an_unexpected_error_is_one_line(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(url: str | None) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(cli, "Client", broken)
    assert main(["jobs"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "packhouse: unexpected RuntimeError: boom: set PACKHOUSE_DEBUG=1 to see where, and report it"
    ]


def test_an_interrupted_wait_says_how_to_cancel(
    capsys: Output, texts: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "wait", interrupted)
    assert main(["submit", str(texts), "--tokenizer", str(tokenizer_dir)]) == 130
    assert "goes on: 'packhouse jobs cancel" in capsys.readouterr().err


def test_a_command_whose_extra_is_missing(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "packhouse.service.main", None)
    assert main(["serve"]) == 2
    assert "pip install 'packhouse[service]'" in capsys.readouterr().err


def test_help_of_a_command_of_another_portion(capsys: Output) -> None:
    assert main(["serve", "--help"]) == 0
    assert "--port" in capsys.readouterr().out
    assert main(["serve", "--colour"]) == 2


def test_the_bare_client_imports_nothing_of_the_extras() -> None:
    code = (
        "import sys; import packhouse.client.cli\n"
        "heavy = {'ray', 'fastapi', 'transformers', 'torch', 'orjson', 'sqlalchemy', 'uvicorn', 'psutil'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "[]"
