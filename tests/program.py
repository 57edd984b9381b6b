"""The program ``packhouse serve`` as a process of the tests."""

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

COMMAND = [sys.executable, "-c", "import sys; from packhouse.client.cli import main; sys.exit(main())", "serve"]


@dataclass(frozen=True)
class Program:
    """A service that runs."""

    process: psutil.Popen
    url: str
    family: list[psutil.Process]

    def left(self) -> list[psutil.Process]:
        """Return the processes of this program that still run."""
        return [one for one in self.family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@contextmanager
def serving(home: Path, **settings: str) -> Iterator[Program]:
    """Run the service with a home and ``settings``, its variables; yield it when it serves."""
    environment = {**os.environ, "PACKHOUSE_CPUS": "1", **settings}
    home.mkdir(parents=True, exist_ok=True)
    command = [*COMMAND, "--port", "0", "--home", str(home)]
    with open(home / "log", "a") as log:
        process = psutil.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    try:
        ready, _, _ = select.select([process.stdout], [], [], 150)
        assert ready, (home / "log").read_text()
        found = re.search(r"https?://\S+", process.stdout.readline())
        assert found, (home / "log").read_text()
        yield Program(process, found[0], [process, *process.children(recursive=True)])
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


def gone(program: Program, seconds: float) -> bool:
    """Return whether nothing of a program is left after some seconds at most."""
    end = time.monotonic() + seconds
    while (left := program.left()) and time.monotonic() < end:
        time.sleep(0.05)
    return not left
