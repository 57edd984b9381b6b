"""Parts of a benchmark: each is measured in a process of its own; their figures are written as JSON and shown together.

It needs the standard library alone, since peers are measured by interpreters that have nothing else of packhouse's.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
Part = Callable[..., Figures]


class PartFailed(Exception):
    """A part's process failed; the message is the last line that it wrote."""


class Skipped(Exception):
    """There is nothing to measure here; the message says why."""


def apart(part: str, *arguments: Any, script: str = sys.argv[0], python: str = sys.executable) -> Figures:
    """Run one part of ``script``, this program unless told otherwise, in a process of its own; return its figures."""
    command = [python, "-W", "ignore", script, "--part", part, "--arguments", json.dumps(arguments)]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise PartFailed(done.stderr.strip().splitlines()[-1])
    measured: Figures = json.loads(done.stdout.splitlines()[-1])
    return measured


def main(
    name: str, parts: dict[str, Part], measure: Callable[[Path], Figures], show: Callable[[Figures], None]
) -> None:
    """Be the program of benchmark ``name``: measure everything in an empty folder, or one part in this process."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--part")
    parser.add_argument("--arguments", type=json.loads, default=[])
    options = parser.parse_args()
    if options.part:
        print(json.dumps(parts[options.part](*options.arguments)))
        return
    folder = options.out.resolve() / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        figures = measure(folder)
    except Skipped as reason:
        print(f"{name}: skipped, {reason}", file=sys.stderr)
        return
    finally:
        shutil.rmtree(folder)
    (options.out / f"{name}.json").write_text(json.dumps(figures, indent=2) + "\n")
    show(figures)
