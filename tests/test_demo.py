"""The demo, run as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import psutil


def test_the_demo_does_the_main_job_end_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "packhouse.client", "demo", "--home", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert list(figures) == ["rows", "tokens", "mb_per_s", "second_run_hit_rate", "plan", "loss_first", "loss_last"]
    assert figures["rows"] > 1000
    assert figures["tokens"] > 100_000
    assert figures["mb_per_s"] > 0
    assert figures["second_run_hit_rate"] == 1.0
    assert figures["loss_last"] < 0.8 * figures["loss_first"]
    assert len(figures["plan"]["id"]) == 32
    assert figures["plan"]["packs"] > 0
    assert 0 <= figures["plan"]["padding"] < 0.01
    left = [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(one.info["cmdline"] or [])]
    assert left == []


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    command = [sys.executable, "-m", "packhouse.client", "demo", "--home", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "is not empty" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
