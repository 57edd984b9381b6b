"""Whole runs on real text: every mode's loss curve, settings, resumption after a kill, evaluation and export."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.conftest import Corpus
from tests.trainer.pool import Pool

from packhouse.client.dataset import PackedDataset
from packhouse.client.errors import InvalidRequest, Mismatch
from packhouse.client.plan import PlanFile
from packhouse.client.store import LocalStore
from packhouse.client.wire_plans import PlanSpec
from packhouse.trainer.config import EvaluationSection, RunConfig, read_config
from packhouse.trainer.evaluate import evaluate
from packhouse.trainer.hf import load_config, load_hf
from packhouse.trainer.model import InternLM2
from packhouse.trainer.parallel import plain
from packhouse.trainer.run import run
from packhouse.worker.plans import build_plan

CPU = torch.device("cpu")


def settings(corpus: Corpus, folder: Path, steps: int = 8, extra: str = "") -> Path:
    """A configuration file of a small run."""
    text = f"""
[model]
name = "tiny"
vocab_size = {-(-corpus.vocab_size // 4) * 4}
[data]
plan = "{corpus.plan}"
store = "{corpus.store}"
[train]
steps = {steps}
peak_lr = 1e-3
betas = [0.9, 0.99]
[log]
jsonl = "{folder}/metrics.jsonl"
[checkpoint]
folder = "{folder}/checkpoints"
every = 2
{extra}
"""
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("[train]\nsteps = 8\nstep = 3\n", r"train.step: Unexpected keyword argument"),
        ("[train]\nsteps = 8.5\n", r"train.steps: Input should be a valid integer"),
        ('[parallel]\nmode = "pp"\n', r"parallel.mode: Input should be 'mtp', 'msp', 'fsp' or 'isp'"),
        ('[optimizer]\nname = "sgd"\n', r"optimizer: Unexpected keyword argument"),
        ('[data]\nplan = "x"\n', r"data: Value error, data has neither store nor service"),
        ("[train]\nsteps = 2026-11-30\n", r"train.steps: Input should be a valid integer"),
        ('[checkpoint]\nfolder = "c"\nkeep = 0\n', r"checkpoint.keep: Input should be greater than or equal to 1"),
        ("[evaluation]\nsteps = 1\nevery = 0\n", r"evaluation.every: Input should be greater than or equal to 1"),
        ("[log]\nevery = 0\n", r"log.every: Input should be greater than or equal to 1"),
        ("[parallel]\nrecompute_layers = -1\n", r"recompute_layers: Input should be greater than or equal to 0"),
        ("x = ", "cannot be read"),
    ],
)
def test_settings_that_are_unknown_or_wrong_are_named(tmp_path: Path, change: str, message: str) -> None:
    whole = {"data": '[data]\nplan = "x"\nstore = "y"\n', "train": "[train]\nsteps = 8\n"}
    text = "".join(part for name, part in whole.items() if f"[{name}]" not in change) + change
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(InvalidRequest, match=message):
        read_config(tmp_path / "run.toml")


def test_lists_and_infinity_are_taken_as_they_are_meant(corpus: Corpus, tmp_path: Path) -> None:
    path = settings(corpus, tmp_path)
    path.write_text(path.read_text().replace("peak_lr = 1e-3", "peak_lr = 1\nclip_norm = inf"))
    train_settings = read_config(path).train
    assert (train_settings.peak_lr, train_settings.betas, train_settings.clip_norm) == (1.0, (0.9, 0.99), math.inf)


def run_case(path: Path) -> list[float]:
    return [entry.loss for entry in run(read_config(path), CPU)]


def test_a_run_in_a_mode_logs_evaluates_and_exports(pool: Pool, corpus: Corpus, tmp_path: Path) -> None:
    extra = f"""export = "{tmp_path}/hf"
[parallel]
mode = "isp"
tp = 2
wp = 4
recompute_layers = 1
[evaluation]
steps = 2
every = 4
"""
    pool.run(4, run_case, settings(corpus, tmp_path, extra=extra))
    entries = metrics(tmp_path)
    assert [entry["step"] for entry in entries if "loss" in entry] == list(range(8))
    losses = {entry["step"]: entry["evaluation_loss"] for entry in entries if "evaluation_loss" in entry}
    assert losses.keys() == {4, 8}
    assert losses[8] < losses[4]
    exported = plain(InternLM2(load_config(tmp_path / "hf")))
    load_hf(tmp_path / "hf", exported)
    store = LocalStore(corpus.store)
    plan = PlanFile.open(store, corpus.plan)
    held_out = list(PackedDataset(plan, store, start_step=plan.steps - 2))
    assert evaluate(exported, held_out) == pytest.approx(losses[8], abs=1e-4)


def test_a_killed_run_goes_on_from_its_last_checkpoint(pool: Pool, corpus: Corpus, tmp_path: Path) -> None:
    """Through torchrun, killed without warning in the middle, and finished in another mode."""
    (tmp_path / "whole").mkdir()
    ((expected, *_),) = (pool.run(1, run_case, settings(corpus, tmp_path / "whole")),)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    extra = '[parallel]\nmode = "msp"\ntp = 2\n'
    command = [*launcher, "-m", "packhouse.trainer", "--config", str(settings(corpus, tmp_path, extra=extra))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment, start_new_session=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step      5"):
                os.killpg(process.pid, signal.SIGKILL)
                break
    done = [entry["loss"] for entry in metrics(tmp_path)]
    rest = pool.run(2, run_case, settings(corpus, tmp_path, extra='[parallel]\nmode = "isp"\nwp = 2\n'))[0]
    assert len(rest) in (2, 4, 6)
    assert done[: 8 - len(rest)] + rest == pytest.approx(expected, abs=2e-4)


@pytest.fixture
def config(corpus: Corpus, tmp_path: Path) -> RunConfig:
    return read_config(settings(corpus, tmp_path))


def test_more_steps_than_the_plan_has_are_refused(config: RunConfig) -> None:
    with pytest.raises(InvalidRequest, match=r"train.steps is 999 and plan .* has \d+ steps to train on: lower"):
        run(replace(config, train=replace(config.train, steps=999)), CPU)


def test_a_vocabulary_that_is_too_small_is_refused(config: RunConfig) -> None:
    with pytest.raises(Mismatch, match=r"has a vocabulary of 6.. and the model one of 512"):
        run(replace(config, model=replace(config.model, vocab_size=None)), CPU)


def test_an_evaluation_plan_that_does_not_fit_is_refused_before_the_first_step(
    config: RunConfig, corpus: Corpus, write_dataset: Any
) -> None:
    store = LocalStore(corpus.store)
    other = build_plan(store, PlanSpec(datasets=[write_dataset(store, [[5000] * 96], vocab_size=6000)], pack_length=96))
    with pytest.raises(Mismatch, match="has a vocabulary of 6000 and the model one of"):
        run(replace(config, evaluation=EvaluationSection(1, plan=other.id)), CPU)


@pytest.mark.parametrize("name", ["msp", "isp"])
def test_a_pack_length_that_cannot_be_cut_is_refused_before_the_first_step(
    pool: Pool, corpus: Corpus, tmp_path: Path, name: str
) -> None:
    store = LocalStore(corpus.store)
    spec = PlanFile.open(store, corpus.plan).spec
    odd = build_plan(store, spec.model_copy(update={"pack_length": 95}))
    path = settings(corpus, tmp_path, extra=f'[parallel]\nmode = "{name}"\ntp = 2\n')
    path.write_text(path.read_text().replace(corpus.plan, odd.id))
    with pytest.raises(AssertionError, match="95 tokens of a pack cannot be cut equally over 2 ranks"):
        pool.run(2, run_case, path)


def test_a_checkpoint_of_another_plan_is_refused(corpus: Corpus, config: RunConfig, tmp_path: Path) -> None:
    run(replace(config, train=replace(config.train, steps=2)), CPU)
    (about,) = (tmp_path / "checkpoints").glob("step-*/about.json")
    about.write_text(about.read_text().replace(corpus.plan, "0" * 32))
    with pytest.raises(Mismatch, match="the state belongs to plan 0000"):
        run(config, CPU)


def test_every_step_of_every_epoch_is_followed_by_the_same_one_after_resuming(corpus: Corpus) -> None:
    store = LocalStore(corpus.store)
    plan = PlanFile.open(store, corpus.plan)
    ids = [batch[0]["input_ids"] for batch in PackedDataset(plan, store)]
    assert len(ids) == plan.steps
    for step in range(1, plan.steps):
        resumed = PackedDataset(plan, store)
        resumed.load_state_dict({"plan": plan.id, "step": step})
        assert torch.equal(next(iter(resumed))[0]["input_ids"], ids[step])


def test_a_run_writes_tensorboard_s_event_file(config: RunConfig, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="written by the package tensorboard, which is optional")
    run(replace(config, log=replace(config.log, tensorboard=tmp_path / "events")), CPU)
    assert list((tmp_path / "events").glob("events.out.tfevents.*"))
