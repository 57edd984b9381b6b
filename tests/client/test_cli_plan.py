"""The command ``packhouse plan``: options, the page, the difference of two plans."""

import json
from pathlib import Path
from typing import Any

import pytest

from packhouse.client.cli import main
from packhouse.client.wire import Job

Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def address(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKHOUSE_URL", service.url)
    monkeypatch.setenv("NO_COLOR", "1")


def answer(capsys: Output, *arguments: str, code: int = 0) -> Any:
    assert main(["plan", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_all_options_reach_the_service(capsys: Output, cached: Job) -> None:
    options = "--pack-length 256 --strategy balanced --ranks 2 --micro-batches 2 --max-segments 9 --epochs 2"
    more = "--cost-token 10 --cost-square 2 --tail drop --dataset-epochs 1.5 --dry-run"
    spec = answer(capsys, str(cached.dataset), *options.split(), *more.split())["spec"]
    assert (spec["strategy"], spec["max_segments"], spec["dataset_epochs"]) == ("balanced", 9, [1.5])
    assert (spec["cost"], spec["tail"], spec["weights"]) == ({"token": 10, "square": 2}, "drop", None)


def test_the_report_is_written_as_a_page(capsys: Output, cached: Job, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    plan = answer(capsys, str(cached.dataset), "--pack-length", "128", "--report", str(page))
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert plan["id"] in text
    assert main(["plan", str(cached.dataset), "--pack-length", "128", "--report", str(tmp_path / "no" / "out")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_two_plans_are_compared(capsys: Output, cached: Job) -> None:
    one, two = (
        answer(capsys, str(cached.dataset), "--pack-length", "128", "--strategy", "hard", "--epochs", epochs)
        for epochs in ("1", "2")
    )
    found = answer(capsys, "diff", one["id"], two["id"])
    assert found["spec"] == {"epochs": [1, 2]}
    assert found["first_step"] is not None
    assert main(["plan", "diff", one["id"], two["id"]]) == 0
    assert "packs in common" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["diff", "a"], "compares two plans, not 1"),
        (["export", "a"], "writes one plan to a folder"),
        (["diff", "0" * 32, "1" * 32], "no plan"),
        (["0" * 32], "pack_length"),
        (["0" * 32, "--pack-length", "8", "--weight", "1", "--weight", "2"], "2 weights for 1"),
    ],
)
def test_wrong_requests_say_what_to_do(capsys: Output, arguments: list[str], words: str) -> None:
    assert main(["plan", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_told(capsys: Output, cached: Job, tmp_path: Path) -> None:
    plan = answer(capsys, str(cached.dataset), "--pack-length", "128")
    (tmp_path / "file").touch()
    assert main(["plan", "export", plan["id"], str(tmp_path / "file" / "folder")]) == 2
    assert "cannot be written" in capsys.readouterr().err
