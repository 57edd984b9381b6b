"""A rank that fails ends the others in bounded time, and each of them says why."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.trainer.pool import Pool
from tests.trainer.steps import make_step, random_samples

from packhouse.trainer import checkpoint
from packhouse.trainer.checkpoint import Checkpoints
from packhouse.trainer.log import quiet
from packhouse.trainer.model import ModelConfig
from packhouse.trainer.optim import TrainConfig, make_optimizer
from packhouse.trainer.parallel import ModeName, build, make_groups
from packhouse.trainer.parallel.failure import first_failure_told
from packhouse.trainer.train import train

SHAPE = ModelConfig(16, 1, num_heads=4, num_kv_heads=4, ffn_size=16, vocab_size=64)


def batches(failing: bool) -> Any:
    """Two steps; then one rank's data cannot be read."""
    step = make_step([random_samples([9, 7], 64)], 16)
    yield from [step, step]
    if failing:
        raise OSError("the store is gone")
    yield step


def fail(name: ModeName, failing: int) -> str:
    groups = make_groups(2)
    started = time.monotonic()
    with first_failure_told():
        train(build(SHAPE, groups, name), batches(groups.world.rank == failing), TrainConfig(3), log=quiet)
    return f"ended well after {time.monotonic() - started} s"


@pytest.mark.parametrize("name", ["mtp", "isp"])
def test_the_others_end_with_the_first_rank_s_reason(pool: Pool, name: ModeName) -> None:
    started = time.monotonic()
    failures = pool.failures(2, fail, name, 1)
    assert time.monotonic() - started < 30
    assert "PeerFailed" not in failures[1]
    assert "OSError: the store is gone" in failures[1]
    assert "PeerFailed: this rank ended because another one did (rank 1: OSError: the store is gone)" in failures[0]


def full_disk(folder: Path, before: bool) -> str:
    """Rank 0 alone cannot write: the folder that all write to, or what it alone writes at the end."""
    groups = make_groups(2)
    model = build(SHAPE, groups, "mtp")
    checkpoints = Checkpoints(folder)
    with ExitStack() as patched:
        if groups.world.rank == 0:
            name = "FileSystemWriter.write_data" if before else "_write_synced"
            patched.enter_context(mock.patch.object(*resolved(name), side_effect=OSError("the disk is full")))
        checkpoints.save(1, model, make_optimizer(model, TrainConfig(1)), {"step": 1})
        try:
            checkpoints.wait()
        except Exception as error:
            return str(error)
    return ""


def resolved(name: str) -> tuple[Any, str]:
    *owner, attribute = name.split(".")
    return (getattr(checkpoint, owner[0]) if owner else checkpoint), attribute


@pytest.mark.parametrize("before", [True, False])
def test_a_checkpoint_that_one_rank_cannot_write_is_an_error_on_all(pool: Pool, tmp_path: Path, before: bool) -> None:
    """Where the others went on, they would wait for the rank that has ended."""
    reasons = pool.run(2, full_disk, tmp_path, before)
    assert all("the disk is full" in reason for reason in reasons)
    assert "rank 0" in reasons[1]


def all_skipped(folder: Path) -> int:
    """A run whose first step had no trained token: its optimizer has not stepped when it is kept."""
    groups = make_groups()
    step = make_step([random_samples([9, 7], 64)], 16, untrained=[0])
    for _ in range(2):
        model = build(SHAPE, groups, "mtp")
        optimizer = make_optimizer(model, TrainConfig(1, shard_optimizer=True))
        checkpoints = Checkpoints(folder)
        found = checkpoints.load(model, optimizer)
        train(model, [step], TrainConfig(1), optimizer=optimizer, log=quiet)
        checkpoints.save(1, model, optimizer, {"step": 1})
        checkpoints.wait()
    assert all(not torch.any(state["exp_avg"]) for state in optimizer.state.values())
    return int(found["step"]) if found else -1


def test_a_run_that_only_skipped_steps_so_far_is_resumed(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, all_skipped, tmp_path) == [1, 1]
