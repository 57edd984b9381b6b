"""The program ``packhouse serve`` as a process: start, kill, restart, signals, and what it refuses."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from packhouse.client.api import Client
from packhouse.client.wire import JobSpec, JobState

COMMAND = [sys.executable, "-c", "import sys; from packhouse.client.cli import main; sys.exit(main())", "serve"]


@dataclass(frozen=True)
class Program:
    process: psutil.Popen
    url: str
    family: list[psutil.Process]

    def left(self) -> list[psutil.Process]:
        """Return the processes of this program that still run."""
        return [one for one in self.family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@contextmanager
def serving(home: Path) -> Iterator[Program]:
    environment = {**os.environ, "PACKHOUSE_CPUS": "1"}
    command = [*COMMAND, "--port", "0", "--home", str(home)]
    with open(home / "log", "a") as log:
        process = psutil.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    try:
        ready, _, _ = select.select([process.stdout], [], [], 60)
        assert ready, (home / "log").read_text()
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found, (home / "log").read_text()
        yield Program(process, found[0], [process, *process.children(recursive=True)])
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


def gone(program: Program, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while (left := program.left()) and time.monotonic() < end:
        time.sleep(0.05)
    return not left


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some seconds of work for one worker: blocks of 16 MB and more."""
    file = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    words = [f"word{n * 7919 % 100_003}" for n in range(120)]
    with open(file, "w") as out:
        for number in range(70_000):
            at = number % 60
            out.write(json.dumps({"text": f"{number} " + " ".join(words[at : at + 60])}) + "\n")
    return file


def test_a_killed_service_takes_its_job_up_again(
    service: Any, tmp_path: Path, corpus: Path, tokenizer_dir: Path
) -> None:
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
    assert "no access tokens yet" in refused("--host", "0.0.0.0", "--home", str(tmp_path))


def test_one_service_a_home(tmp_path: Path) -> None:
    from packhouse.service.home import locked

    with locked(tmp_path):
        message = refused("--port", "0", "--home", str(tmp_path))
        assert f"another service (process {os.getpid()})" in message
