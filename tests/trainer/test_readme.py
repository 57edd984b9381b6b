"""The examples of the trainer's README hold as they stand."""

import re
from pathlib import Path

import pytest
from tests.trainer.test_collectives import TABLE

from packhouse.trainer.config import read_config
from packhouse.trainer.model import CONFIGS

README = (Path(__file__).parents[2] / "trainer" / "README.md").read_text(encoding="utf-8")


def example(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    return str(found)


def test_the_example_runs_and_its_loss_falls(capsys: pytest.CaptureFixture[str]) -> None:
    exec(example("python"), {})
    losses = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < losses[0] / 2


def test_the_settings_are_ones_that_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(example("toml"), encoding="utf-8")
    config = read_config(tmp_path / "run.toml")
    assert config.model.shape() == CONFIGS["1.8b"]
    assert (config.parallel.mode, config.parallel.tp, config.parallel.wp) == ("isp", 2, 8)


def test_the_table_of_collectives_is_the_one_that_is_counted() -> None:
    for name, *counted in TABLE:
        (row,) = re.findall(rf"^\| `{name}` \| (\d.*?) \| (.*?) \|$", README, flags=re.MULTILINE)
        for cell, expected in zip(row, counted, strict=True):
            found = {kind: int(number) for number, kind in re.findall(r"(\d) ([a-z]+-[a-z-]*[a-z])", cell)}
            assert found == expected
