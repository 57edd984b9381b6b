"""P6: each token is delivered exactly once, and the node's cache stays sane, whoever is killed at any point."""

from pathlib import Path

import pytest
from tests.client.fire import VICTIMS, Run, make_plan

from packhouse.client.store import LocalStore

pytestmark = [pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")]


@pytest.mark.parametrize("seed", [1, 2])
def test_p6_a_run_under_fire_has_each_token_once(tmp_path: Path, seed: int) -> None:
    plan = make_plan(LocalStore(tmp_path / "home" / "store"))
    run = Run(tmp_path / "home", tmp_path / "run", plan, seed, 0)
    run.orders = [*VICTIMS]
    run.chance.shuffle(run.orders)
    run.finish()
    run.check()
    assert sum(run.killed.values()) >= 3
    assert run.starts >= 2
