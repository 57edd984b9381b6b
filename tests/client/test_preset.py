"""Presets over REST: a plan goes out in XTuner's form, comes back, and what is not a preset is refused."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from packhouse.client.api import Client
from packhouse.client.cli import main
from packhouse.client.errors import InvalidRequest
from packhouse.client.plan_diff import plan_diff
from packhouse.client.preset import from_zip, read_files, to_zip
from packhouse.client.wire import Job
from packhouse.client.wire_plans import PlanSpec


def test_an_exported_plan_is_planned_again_by_the_command(
    service: Any, cached: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACKHOUSE_URL", service.url)
    with Client(service.url) as client:
        plan = client.plan(PlanSpec(datasets=[str(cached.dataset)], pack_length=128, ranks=2))
        assert main(["plan", "export", plan.id, str(tmp_path), "--path", "/data/texts.jsonl"]) == 0
        assert json.loads((tmp_path / "paths.json").read_text()) == ["/data/texts.jsonl"]
        options = ["--pack-length", "128", "--ranks", "2", "--strategy", "preset", "--preset", str(tmp_path)]
        assert main(["plan", str(cached.dataset), *options, "--json"]) == 0
        again = json.loads(capsys.readouterr().out)
        found = plan_diff(client.open_plan(plan.id), client.open_plan(again["id"]))
    assert (found.first_step, found.steps_in_common) == (None, plan.report.steps)


def test_what_is_not_a_preset_is_refused(service: Any, tmp_path: Path) -> None:
    answer = httpx.post(f"{service.url}/v1/presets", content=b"not a zip")
    assert (answer.status_code, answer.json()["remedy"]) == (422, "send its files in one")
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("../boundaries.npy", b"")
    with pytest.raises(InvalidRequest, match="a preset has no file"):
        from_zip(other.getvalue())
    with Client(service.url) as client, pytest.raises(InvalidRequest, match="is not a preset"):
        client.put_preset(tmp_path)


def test_files_survive_the_wire(tmp_path: Path) -> None:
    for name in ("boundaries.npy", "samples.npy", "paths.json"):
        (tmp_path / name).write_bytes(name.encode())
    assert from_zip(to_zip(read_files(tmp_path))) == read_files(tmp_path)
