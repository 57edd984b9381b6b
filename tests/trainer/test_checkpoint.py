"""Checkpoints: another mode, world and size go on where one stopped, and a kill leaves the last good one."""

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.trainer.pool import Pool
from tests.trainer.steps import Step, make_step, random_samples
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from packhouse.client.errors import Mismatch
from packhouse.trainer import checkpoint
from packhouse.trainer.checkpoint import Checkpoints, name_of
from packhouse.trainer.log import quiet
from packhouse.trainer.model import InternLM2, ModelConfig
from packhouse.trainer.optim import TrainConfig, make_optimizer
from packhouse.trainer.parallel import ModeName, ShardedModel, build, make_groups, plain
from packhouse.trainer.train import train

SHAPE = ModelConfig(32, 2, num_heads=8, num_kv_heads=4, ffn_size=48, vocab_size=64)
STEPS, STOP, PACKS = 6, 3, 4
Setup = tuple[int, ModeName, int, int | None]


def steps(rank: int, ranks: int) -> list[Step]:
    """This data rank's part of every step, in which there are four packs."""
    made = []
    for step in range(STEPS):
        packs = [random_samples([7, 9], 64, PACKS * step + row) for row in range(PACKS)]
        data, labels = make_step(packs[rank * PACKS // ranks : (rank + 1) * PACKS // ranks], 16)
        made.append(({**data, "step": step}, labels))
    return made


def go(folder: Path | None, name: ModeName, tp: int, wp: int | None, stop: int, shard: bool) -> list[float]:
    """Train up to `stop`, from the last checkpoint; the losses of the steps that were run."""
    groups = make_groups(tp, wp)
    model = build(SHAPE, groups, name, seed=4)
    model.model.double()
    config = TrainConfig(STEPS, peak_lr=1e-2, warmup_steps=2, schedule="cosine", shard_optimizer=shard, clip_norm=0.5)
    optimizer = make_optimizer(model, config)
    first, checkpoints = 0, None
    if folder is not None:
        checkpoints = Checkpoints(folder)
        found = checkpoints.load(model, optimizer)
        first = found["data"]["step"] if found else 0
    batches = steps(groups.data.rank, groups.data.size)[first:stop]
    logs = train(model, batches, config, optimizer=optimizer, log=quiet)
    if checkpoints is not None:
        checkpoints.save(stop, model, optimizer, {"plan": "p", "step": stop})
        checkpoints.wait()
    return [entry.loss for entry in logs]


@pytest.fixture(scope="module")
def unbroken(pool: Pool) -> list[float]:
    return list(pool.run(1, go, None, "mtp", 1, None, STEPS, False)[0])


@pytest.mark.parametrize(
    ("before", "after", "shard"),
    [
        ((4, "isp", 2, 4), (2, "mtp", 2, None), False),
        ((4, "mtp", 2, None), (4, "isp", 4, 2), True),
        ((2, "msp", 2, None), (1, "mtp", 1, None), False),
        ((1, "mtp", 1, None), (4, "isp", 1, 4), False),
        ((4, "fsp", 4, None), (4, "mtp", 1, None), True),
    ],
)
def test_a_run_goes_on_under_another_mode_and_world(
    pool: Pool, tmp_path: Path, unbroken: list[float], before: Setup, after: Setup, shard: bool
) -> None:
    losses = []
    for (world, *setup), stop in ((before, STOP), (after, STEPS)):
        losses += pool.run(world, go, tmp_path, *setup, stop, shard)[0]
    assert losses == pytest.approx(unbroken, rel=0, abs=1e-9)
    assert sorted(path.name for path in tmp_path.iterdir()) == [name_of(STOP), name_of(STEPS)]


def trained(folder: Path, **settings: Any) -> tuple[Checkpoints, ShardedModel, torch.optim.Optimizer]:
    model = plain(InternLM2(SHAPE))
    optimizer = make_optimizer(model, TrainConfig(1))
    train(model, steps(0, 1)[:1], TrainConfig(1), optimizer=optimizer, log=quiet)
    return Checkpoints(folder, **settings), model, optimizer


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    checkpoints, model, optimizer = trained(tmp_path, keep=2)
    for step in range(1, 6):
        checkpoints.save(step, model, optimizer, {"step": step})
    checkpoints.wait()
    assert [path.name for path in sorted(tmp_path.iterdir())] == [name_of(4), name_of(5)]


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, model, optimizer = trained(tmp_path)
    expected, go_on = model.model.output.weight.detach().clone(), threading.Event()
    write = Checkpoints._write

    def slow(self: Checkpoints, *args: Any) -> None:
        go_on.wait(30)
        write(self, *args)

    monkeypatch.setattr(Checkpoints, "_write", slow)
    checkpoints.save(1, model, optimizer, {"step": 1})
    with torch.no_grad():
        model.model.output.weight.zero_()
    go_on.set()
    checkpoints.wait()
    checkpoints.load(model, optimizer)
    torch.testing.assert_close(model.model.output.weight.detach(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("moment", ["save", "_write_synced", "replace"])
def test_a_write_that_ends_early_leaves_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    checkpoints, model, optimizer = trained(tmp_path)
    checkpoints.save(1, model, optimizer, {"step": 1})
    checkpoints.wait()

    def killed(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os if moment == "replace" else checkpoint, moment, killed)
        checkpoints.save(2, model, optimizer, {"step": 2})
        with pytest.raises(OSError, match="no space left"):
            checkpoints.wait()
    again = Checkpoints(tmp_path)
    found = again.load(model, optimizer)
    assert found is not None
    assert found["data"] == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == [name_of(1)]


def killed(folder: Path, moment: str) -> None:
    """Rank 0 is ended without warning while its second checkpoint is written, or while an older one is removed."""
    model = build(SHAPE, make_groups(2), "mtp")
    optimizer = make_optimizer(model, TrainConfig(1))
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(1, model, optimizer, {"step": 1})
    checkpoints.wait()
    if dist.get_rank() == 0:
        owner = {"write_data": FileSystemWriter, "replace": os, "rmtree": shutil}[moment]
        setattr(owner, moment, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
    checkpoints.save(2, model, optimizer, {"step": 2})
    checkpoints.wait()


def found(folder: Path) -> tuple[int, list[str]]:
    model = build(SHAPE, make_groups(1, 2), "isp", seed=None)
    about = Checkpoints(folder).load(model, make_optimizer(model, TrainConfig(1)))
    assert about is not None
    return about["data"]["step"], [path.name for path in folder.iterdir()]


@pytest.mark.parametrize(("moment", "step"), [("write_data", 1), ("replace", 1), ("rmtree", 2)])
def test_a_kill_in_a_checkpoint_leaves_the_last_whole_one(pool: Pool, tmp_path: Path, moment: str, step: int) -> None:
    """SIGKILL; the other rank ends as well, and the next run goes on in another mode and sweeps what was left."""
    ended = pool.failures(2, killed, tmp_path, moment)
    assert "exit code -9" in ended[0]
    assert pool.run(2, found, tmp_path) == [(step, [name_of(step)])] * 2


def test_a_rank_of_a_killed_run_that_still_writes_spoils_nothing(tmp_path: Path) -> None:
    late = Checkpoints(tmp_path)
    checkpoints, model, optimizer = trained(tmp_path)
    (tmp_path / f"{name_of(1)}{late._suffix}").mkdir()
    (tmp_path / f"{name_of(1)}{late._suffix}" / "__0_0.distcp").write_text("half of a file")
    checkpoints.save(1, model, optimizer, {"step": 1})
    checkpoints.wait()
    assert {path.name for path in (tmp_path / name_of(1)).iterdir()} == {".metadata", "__0_0.distcp", "about.json"}
    assert checkpoints.load(model, optimizer) is not None
    trained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name_of(1)]


def test_a_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    checkpoints, model, optimizer = trained(tmp_path)
    checkpoints.save(1, model, optimizer, {"step": 1})
    other = plain(InternLM2(ModelConfig(32, 3, num_heads=8, num_kv_heads=4, ffn_size=48, vocab_size=64)))
    with pytest.raises(Mismatch, match="is of a model with num_layers 2 and not 3"):
        checkpoints.load(other, make_optimizer(other, TrainConfig(1)))
