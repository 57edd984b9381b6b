"""The program ``packhouse serve`` as a process: start, kill, restart, signals, and what it refuses."""

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
from tests.program import COMMAND, gone, serving

from packhouse.client.api import Client
from packhouse.client.wire import JobSpec, JobState


def test_a_killed_service_takes_its_job_up_again(
    service: Any, tmp_path: Path, corpus: Path, tokenizer_dir: Path
) -> None:
    """Case B087."""
    spec = JobSpec(sources=[str(corpus)], tokenizer=str(tokenizer_dir))
    with serving(tmp_path) as program, Client(program.url) as client:
        job = client.submit(spec)
        while client.job(job.id).progress.phase != "encoding":
            time.sleep(0.01)
        os.kill(program.process.pid, signal.SIGKILL)
        assert gone(program, 5), program.left()
    with serving(tmp_path) as program, Client(program.url) as client:
        finished = client.wait(job.id)
        assert finished.version > 1 << 20
        assert program.process.terminate() is None
        assert gone(program, 20), program.left()
    assert not list((tmp_path / "store" / "tmp").glob("*"))
    with Client(service.url) as client:
        undisturbed = client.wait(client.submit(spec).id)
    assert (finished.dataset, finished.progress.rows) == (undisturbed.dataset, undisturbed.progress.rows)


def test_a_signal_ends_it_in_time_with_a_stream_open(tmp_path: Path, corpus: Path, tokenizer_dir: Path) -> None:
    with serving(tmp_path) as program, Client(program.url) as client:
        job = client.submit(JobSpec(sources=[str(corpus)], tokenizer=str(tokenizer_dir)))
        with httpx.stream("GET", f"{program.url}/v1/jobs/{job.id}/events", timeout=30) as response:
            lines = response.iter_lines()
            assert next(lines) == "retry: 1000"
            program.process.terminate()
            begun = time.monotonic()
            states = [json.loads(line[6:])["state"] for line in lines if line.startswith("data: ")]
        assert set(states) <= {"queued", "running"}
        assert gone(program, 20 - (time.monotonic() - begun)), program.left()
        assert program.process.wait() == 0
    with serving(tmp_path) as program, Client(program.url) as client:
        assert client.job(job.id).state in (JobState.QUEUED, JobState.RUNNING)
        assert client.cancel(job.id).id == job.id


def refused(*arguments: str) -> str:
    run = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=30)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    return run.stderr


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        begun = time.monotonic()
        message = refused("--port", str(port), "--home", str(tmp_path))
        assert f"port {port} of 127.0.0.1 cannot be used" in message
        assert "--port" in message
        assert time.monotonic() - begun < 10
    assert not (tmp_path / "lock").exists()


def test_an_open_address_is_refused(tmp_path: Path) -> None:
    message = refused("--host", "0.0.0.0", "--home", str(tmp_path))
    assert "there is no access token: make one with 'packhouse token create NAME --role admin'" in message


def test_one_service_a_home(tmp_path: Path) -> None:
    from packhouse.service.home import locked

    with locked(tmp_path):
        message = refused("--port", "0", "--home", str(tmp_path))
        assert f"another service (process {os.getpid()})" in message
