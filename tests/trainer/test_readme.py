"""The example of the trainer's README runs as it stands."""

import re
from pathlib import Path

import pytest


def test_the_example_runs_and_its_loss_falls(capsys: pytest.CaptureFixture[str]) -> None:
    readme = Path(__file__).parents[2] / "trainer" / "README.md"
    (example,) = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), flags=re.DOTALL)
    exec(example, {})
    losses = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < losses[0] / 2
