"""The checkers that the tests of deploy/ use, where they are."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def checker(name: str) -> str:
    """Return the path of a program; skip the test where it is missing."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed: make deploy-tools")
    return path


def run(*command: str, cwd: Path = DEPLOY) -> str:
    """Return what a command prints; fail the test with its words if it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def load(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text())


class Recording(Mapping[str, str]):
    """An empty environment that remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.asked.add(name)
        raise KeyError(name)

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0
