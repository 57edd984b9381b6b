"""A whole training run from its settings: data, model, optimizer, resumption, evaluation, metrics, export."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
from torch.utils.data import DataLoader

from packhouse.client.api import Client
from packhouse.client.dataset import PackedDataset
from packhouse.client.errors import InvalidRequest, Mismatch
from packhouse.client.plan import PlanFile, PlanSource
from packhouse.client.plan_header import PlanHeader
from packhouse.client.store import LocalStore, ReadStore
from packhouse.trainer.checkpoint import Checkpoints
from packhouse.trainer.config import DataSection, EvaluationSection, RunConfig
from packhouse.trainer.evaluate import evaluate
from packhouse.trainer.hf import load_hf, save_hf
from packhouse.trainer.log import JsonLines, StepLog, TensorBoard, print_step
from packhouse.trainer.optim import make_optimizer
from packhouse.trainer.parallel import Groups, Options, ShardedModel, build, make_groups
from packhouse.trainer.parallel.collectives import check_divides
from packhouse.trainer.repeat import RepeatedPlan
from packhouse.trainer.train import train


def run(config: RunConfig, device: torch.device) -> list[StepLog]:
    """Train as `config` says, going on from its last checkpoint if there is one; returns the log. Collective."""
    groups = make_groups(config.parallel.tp, config.parallel.wp, timedelta(seconds=config.parallel.timeout))
    source, store = open_data(config.data, config.data.plan)
    config, source = _to_the_end(config, source)
    kept = config.checkpoint
    checkpoints = Checkpoints(kept.folder, keep=kept.keep) if kept is not None else None
    # A model that is loaded next need not be drawn: in a large one that takes minutes.
    model = make_model(config, groups, device, drawn=checkpoints is None or checkpoints.latest() is None)
    _check_packs(source.header, model)
    dataset = PackedDataset(source, store, groups.data.rank, groups.data.size)
    optimizer = make_optimizer(model, config.train)
    found = checkpoints.load(model, optimizer) if checkpoints is not None else None
    if found is not None:
        dataset.load_state_dict(found["data"])
    sinks = _Sinks(config, groups)
    after_step = _after_step(config, model, optimizer, checkpoints, sinks)
    loader = DataLoader(dataset, batch_size=None, num_workers=config.data.workers)
    try:
        logs = train(model, loader, config.train, optimizer=optimizer, log=sinks.step, after_step=after_step)
        if checkpoints is not None:
            checkpoints.wait()
    finally:
        sinks.close()
    if kept is not None and kept.export is not None:
        save_hf(kept.export, model, dtype=torch.bfloat16 if config.train.bf16 else None)
    return logs


def make_model(config: RunConfig, groups: Groups, device: torch.device, *, drawn: bool = True) -> ShardedModel:
    """This rank's part of the model, with the weights of a public checkpoint or, unless it is loaded next, its seed."""
    parallel = config.parallel
    options = Options(parallel.parallel_output, parallel.overlap, parallel.recompute_layers)
    seed = config.model.seed if config.model.hf is None and drawn else None
    model = build(config.model.shape(), groups, parallel.mode, options, seed=seed, device=device)
    if config.model.hf is not None and drawn:
        load_hf(config.model.hf, model)
    return model


def open_data(data: DataSection, plan: str) -> tuple[PlanSource, ReadStore]:
    """The plan and its shards: from the store's folder where one is named, else through the service."""
    if data.store is not None:
        store = LocalStore(data.store)
        return PlanFile.open(store, plan), store
    client = Client(data.service)
    return client.open_plan(plan), client.open_store()


def _to_the_end(config: RunConfig, source: PlanSource) -> tuple[RunConfig, PlanSource]:
    """The settings and the plan of a run whose steps are all there; raises InvalidRequest where `at_end` is "error"."""
    header, wanted = source.header, config.train.steps
    held_out = config.evaluation.steps if config.evaluation and config.evaluation.plan is None else 0
    steps = header.steps - held_out
    if wanted <= steps:
        return config, source
    has = f"train.steps is {wanted} and plan {header.id} has {max(steps, 0)} steps to train on"
    if steps < 1:
        raise InvalidRequest(f"{has}, as evaluation holds out {held_out} of its {header.steps}", "hold out fewer")
    if config.data.at_end == "repeat":
        return config, RepeatedPlan(source, steps, wanted)
    if config.data.at_end == "stop":
        warmup = min(config.train.warmup_steps, steps)
        return replace(config, train=replace(config.train, steps=steps, warmup_steps=warmup)), source
    epochs = -(-header.spec.epochs * (wanted + held_out) // header.steps)
    raise InvalidRequest(
        has, f'lower train.steps, plan with epochs {epochs} or more, or set data.at_end to "stop" or "repeat"'
    )


def _check_packs(header: PlanHeader, model: ShardedModel) -> None:
    """Raise before the first step for ids or a pack length with which the model could not do some later one."""
    largest = max(dataset.vocab_size for dataset in header.datasets)
    vocab_size = model.model.config.vocab_size
    if largest > vocab_size:
        raise Mismatch(
            f"plan {header.id} has a vocabulary of {largest} and the model one of {vocab_size}",
            "set model.vocab_size to at least the plan's",
        )
    if model.mode.cut_sequence:
        check_divides(header.spec.pack_length, model.groups.tensor.size, "tokens of a pack")


def _after_step(
    config: RunConfig,
    model: ShardedModel,
    optimizer: torch.optim.Optimizer,
    checkpoints: Checkpoints | None,
    sinks: "_Sinks",
) -> Callable[[int], None]:
    """What happens between two steps: evaluation and checkpoints, on all ranks alike."""
    evaluation, kept = config.evaluation, config.checkpoint
    held_out = _held_out(config, evaluation, model) if evaluation is not None else None

    def after_step(step: int) -> None:
        last = step == config.train.steps
        if evaluation is not None and held_out is not None and (last or step % evaluation.every == 0):
            some = itertools.islice(held_out, evaluation.steps)
            sinks.evaluated(step, evaluate(model, some, bf16=config.train.bf16))
        if checkpoints is not None and kept is not None and (last or step % kept.every == 0):
            checkpoints.save(step, model, optimizer, {"plan": config.data.plan, "step": step})

    return after_step


def _held_out(config: RunConfig, evaluation: EvaluationSection, model: ShardedModel) -> PackedDataset:
    """The steps that are not trained on; each iteration starts anew."""
    source, store = open_data(config.data, evaluation.plan or config.data.plan)
    _check_packs(source.header, model)
    steps, groups = source.header.steps, model.groups
    if evaluation.steps > steps:
        raise InvalidRequest(
            f"evaluation.steps is {evaluation.steps} and plan {source.header.id} has {steps}", "lower evaluation.steps"
        )
    first = steps - evaluation.steps if evaluation.plan is None else 0
    return PackedDataset(source, store, groups.data.rank, groups.data.size, start_step=first)


class _Sinks:
    """Where the metrics go: rank 0 alone writes them."""

    def __init__(self, config: RunConfig, groups: Groups) -> None:
        self._leads = groups.world.rank == 0
        self._every, self._last = config.log.every, config.train.steps - 1
        self._files: list[JsonLines | TensorBoard] = []
        if self._leads and config.log.jsonl is not None:
            self._files.append(JsonLines(config.log.jsonl))
        if self._leads and config.log.tensorboard is not None:
            self._files.append(TensorBoard(config.log.tensorboard))

    def step(self, entry: StepLog) -> None:
        for file in self._files:
            file(entry)
        if self._leads and (entry.step % self._every == 0 or entry.step == self._last or entry.skipped):
            print_step(entry)

    def evaluated(self, step: int, loss: float) -> None:
        for file in self._files:
            file.write({"step": step, "evaluation_loss": loss})
        if self._leads:
            print(f"step {step:>6}  evaluation loss {loss:8.4f}", flush=True)

    def close(self) -> None:
        for file in self._files:
            file.close()
