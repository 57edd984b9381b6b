"""Fifty steps on real text, cached and planned by the service: every mode has the plain model's loss curve."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import RunningService
from tests.trainer.pool import Pool

from packhouse.client.api import Client
from packhouse.client.dataset import PackedDataset
from packhouse.client.plan import PlanFile
from packhouse.client.store import LocalStore
from packhouse.client.wire import JobSpec
from packhouse.client.wire_plans import PlanSpec
from packhouse.trainer.log import quiet
from packhouse.trainer.model import ModelConfig
from packhouse.trainer.optim import TrainConfig, make_optimizer
from packhouse.trainer.parallel import ModeName, build, make_groups
from packhouse.trainer.parallel.shard import whole_parameter
from packhouse.trainer.train import train

STEPS = 50
Sizes = tuple[ModeName, int, int | None]


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan in the service's store."""

    store: str
    plan: str
    vocab_size: int


@pytest.fixture(scope="module")
def planned(service: RunningService, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Planned:
    """This project's own sources: a job and a plan over REST, with more steps of two packs than are trained."""
    file = tmp_path_factory.mktemp("sources") / "sources.jsonl"
    sources = sorted(Path(__file__).parent.glob("*.py"))
    file.write_text("".join(json.dumps({"text": path.read_text()[:2000]}) + "\n" for path in sources))
    with Client(service.url) as client:
        job = client.wait(client.submit(JobSpec(sources=[str(file)], tokenizer=str(tokenizer_dir))).id)
        assert job.dataset is not None
        spec = PlanSpec(datasets=[job.dataset], pack_length=64, ranks=2, overlong="split", epochs=2)
        plan = client.plan(spec)
        assert plan.report.steps >= STEPS
        return Planned(str(service.parts.settings.store), plan.id, client.dataset(job.dataset).vocab_size)


def curves(planned: Planned, sizes: list[Sizes], steps: int) -> list[tuple[list[float], Any]]:
    """The losses of `steps` steps in fp64 under each of `sizes`, and the norms' weights after them."""
    return [curve(planned, *one, steps) for one in sizes]


def curve(planned: Planned, name: ModeName, tp: int, wp: int | None, steps: int) -> tuple[list[float], Any]:
    vocab_size = -(-planned.vocab_size // 4) * 4
    shape = ModelConfig(32, 1, num_heads=8, num_kv_heads=4, ffn_size=64, vocab_size=vocab_size)
    groups = make_groups(tp, wp)
    model = build(shape, groups, name, seed=1)
    model.model.double()
    config = TrainConfig(STEPS, peak_lr=1e-2, warmup_steps=5, schedule="cosine")
    store = LocalStore(planned.store)
    batches = PackedDataset(PlanFile.open(store, planned.plan), store, groups.data.rank, groups.data.size)
    some = itertools.islice(batches, steps)
    logs = train(model, some, config, optimizer=make_optimizer(model, config), log=quiet)
    norms = {n: whole_parameter(x, model.placements[n]) for n, x in model.model.named_parameters() if "norm" in n}
    return [entry.loss for entry in logs], {name: norm.detach().tolist() for name, norm in norms.items()}


@pytest.fixture(scope="module")
def plain_curve(pool: Pool, planned: Planned) -> tuple[list[float], Any]:
    (((losses, norms),),) = pool.run(1, curves, planned, [("mtp", 1, None)], STEPS)
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 1
    return losses, norms


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (2, [("mtp", 2, None), ("msp", 2, None), ("fsp", 2, None), ("isp", 2, 2)]),
        (4, [("mtp", 4, None), ("msp", 2, None), ("fsp", 2, None), ("isp", 2, 4)]),
    ],
)
def test_fifty_steps_agree_over_all_modes(
    pool: Pool, planned: Planned, plain_curve: tuple[list[float], Any], world: int, sizes: list[Sizes]
) -> None:
    expected, expected_norms = plain_curve
    for found in pool.run(world, curves, planned, sizes, STEPS):
        for one, (losses, norms) in zip(sizes, found, strict=True):
            assert losses == pytest.approx(expected, rel=0, abs=1e-8), one
            torch.testing.assert_close(norms, expected_norms, rtol=0, atol=1e-8)


def test_ranks_that_have_only_empty_packs_change_nothing(
    pool: Pool, planned: Planned, plain_curve: tuple[list[float], Any]
) -> None:
    """Four data ranks, and two packs in a step."""
    for ((losses, _),) in pool.run(4, curves, planned, [("isp", 1, 4)], 10):
        assert losses == pytest.approx(plain_curve[0][:10], rel=0, abs=1e-8)
