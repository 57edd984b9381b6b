"""The ledger: a whole run is proven whole, across restarts and worlds; every fault is found and placed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packhouse.client import loader
from packhouse.client.cli import main
from packhouse.client.dataset import PackedDataset
from packhouse.client.errors import InvalidRequest, Mismatch
from packhouse.client.ledger import audit
from packhouse.client.plan import PlanFile
from packhouse.client.store import LocalStore
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.plans import build_plan

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory, write_dataset: Callable[..., str]) -> PlanFile:
    store = LocalStore(tmp_path_factory.mktemp("store"))
    dataset = write_dataset(store, [[100 + i] * (1 + i * 7 % 13) for i in range(50)], rows_per_shard=25)
    return PlanFile.open(store, build_plan(store, PlanSpec(datasets=[dataset], pack_length=16, ranks=3)).id)


def run(plan: PlanFile, folder: Path, world: int, start: int = 0, stop: int | None = None, workers: int = 0) -> None:
    """Deliver steps ``start:stop`` to every rank of ``world``, one log a rank."""
    folder.mkdir(exist_ok=True)
    for rank in range(world):
        batches = loader(PackedDataset(plan, plan.store, rank, world), workers=workers, log=folder / f"{rank}.jsonl")
        batches.load_state_dict({"plan": plan.id, "step": start})
        for step, _ in enumerate(batches, start):
            if step + 1 == stop:
                break


def logs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl"))


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 2), (3, 0), (5, 0)])
def test_a_whole_run_is_exact(plan: PlanFile, tmp_path: Path, world: int, workers: int) -> None:
    run(plan, tmp_path, world, workers=workers)
    found = audit(plan, plan.store, logs(tmp_path))
    assert found.exact
    assert (found.packs, found.tokens) == (plan.report.packs, plan.report.tokens)
    assert found.delivered == found.packs


def test_a_restart_in_another_world_takes_back_what_it_does_again(plan: PlanFile, tmp_path: Path) -> None:
    run(plan, tmp_path, 4, stop=5)  # went down after step 4; the checkpoint was of step 3
    run(plan, tmp_path, 4, start=3, stop=4)
    run(plan, tmp_path, 2, start=3)
    assert audit(plan, plan.store, logs(tmp_path)).exact


def test_a_log_of_its_own_for_every_start_does_as_well(plan: PlanFile, tmp_path: Path) -> None:
    for number, (world, start, stop) in enumerate([(2, 0, 3), (2, 0, 5), (2, 4, 6), (3, 4, None)]):
        (tmp_path / str(number)).mkdir()
        run(plan, tmp_path / str(number), world, start, stop)
    assert audit(plan, plan.store, sorted(tmp_path.rglob("*.jsonl"))).exact


def test_every_fault_is_found(plan: PlanFile, tmp_path: Path) -> None:
    run(plan, tmp_path, 2)
    log = tmp_path / "0.jsonl"
    lines = log.read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    lines[1:2] = []  # not delivered
    lines.append(lines[4])  # twice
    wrong = {**entries[3], "pack": "0" * 32}
    lines[2] = json.dumps(wrong)
    lines.append(json.dumps({**entries[3], "slot": 99}))
    log.write_text("\n".join(lines) + "\n")
    found = audit(plan, plan.store, logs(tmp_path))
    place = [(entry.get("step"), entry.get("slot")) for entry in entries]
    assert (found.missing, found.repeated, found.altered) == ([place[1]], [place[5]], [place[3]])
    assert found.unplanned == [(entries[3]["step"], 99)]
    assert found.delivered == found.packs - 3


def test_half_a_line_is_no_delivery_and_no_error(plan: PlanFile, tmp_path: Path) -> None:
    run(plan, tmp_path, 1, stop=4)
    log = tmp_path / "0.jsonl"
    log.write_bytes(log.read_bytes()[:-10])  # killed while it wrote
    found = audit(plan, plan.store, [log], stop=4)
    assert [step for step, _ in found.missing] == [3]
    run(plan, tmp_path, 1, start=3)
    assert audit(plan, plan.store, [log]).exact


def test_logs_of_another_plan_or_none_are_refused(plan: PlanFile, tmp_path: Path) -> None:
    run(plan, tmp_path, 1, stop=1)
    log = tmp_path / "0.jsonl"
    log.write_text(log.read_text().replace(plan.id, "f" * 32))
    with pytest.raises(Mismatch, match=f"is of plan f{{32}} and not {plan.id}"):
        audit(plan, plan.store, [log])
    with pytest.raises(InvalidRequest, match="cannot be read"):
        audit(plan, plan.store, [tmp_path / "none"])
    log.write_text('{"step": 0, "slot": 0, "pack": ""}\n')
    with pytest.raises(InvalidRequest, match="does not begin with a pass"):
        audit(plan, plan.store, [log])
    for line in ("12", "{}", '{"start": 0}'):
        run(plan, tmp_path / "other", 1, stop=1)
        log.write_text(f"{(tmp_path / 'other' / '0.jsonl').read_text()}{line}\n")
        with pytest.raises(InvalidRequest, match=r"line \d+ of the log .* is none of a Loader"):
            audit(plan, plan.store, [log])


@pytest.mark.parametrize("stop", [-1, 10_000])
def test_steps_that_the_plan_does_not_have_prove_nothing(plan: PlanFile, tmp_path: Path, stop: int) -> None:
    run(plan, tmp_path, 1)
    with pytest.raises(InvalidRequest, match=f"steps 0 to {stop} are not in plan"):
        audit(plan, plan.store, logs(tmp_path), stop)


@pytest.mark.parametrize("step", [-1, 10_000])
def test_a_step_that_the_plan_does_not_have_is_unplanned(plan: PlanFile, tmp_path: Path, step: int) -> None:
    run(plan, tmp_path, 1)
    with open(tmp_path / "0.jsonl", "a") as log:
        log.write(json.dumps({"step": step, "slot": 0, "pack": "0" * 32}) + "\n")
    assert audit(plan, plan.store, logs(tmp_path)).unplanned == [(step, 0)]


def test_the_command_says_exact_or_ends_with_1(plan: PlanFile, tmp_path: Path, capsys: Any) -> None:
    run(plan, tmp_path, 2)
    store: LocalStore = plan.store  # type: ignore[assignment]
    words = ["plan", "audit", plan.id, "--store", str(store.root)]
    given = [word for log in logs(tmp_path) for word in ("--log", str(log))]
    assert main([*words, *given]) == 0
    assert "each planned token was delivered exactly once" in capsys.readouterr().out
    assert main([*words, *given[:2], "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["missing"]
    assert main(words) == 2
    assert "the log of every rank with --log" in capsys.readouterr().err
