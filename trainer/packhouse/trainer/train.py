"""The training loop: one optimizer step for every step of a plan, with every trained token weighing the same."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from packhouse.client.errors import Mismatch
from packhouse.client.pack import IGNORE
from packhouse.trainer.flops import peak_flops
from packhouse.trainer.log import Sink, StepLog, print_step, quiet
from packhouse.trainer.model import InternLM2
from packhouse.trainer.optim import TrainConfig, learning_rate, make_optimizer
from packhouse.trainer.parallel import plain
from packhouse.trainer.parallel.collectives import all_reduce
from packhouse.trainer.parallel.sharded import ShardedModel
from packhouse.trainer.step import (
    StepCounts,
    accumulate_gradients,
    count_step,
    gradient_norm,
    gradients_by_pack,
    packs_not_finite,
    sum_gradients,
)

__all__ = ["StepLog", "check_vocabulary", "print_step", "run_step", "train", "update"]


def train(
    model: InternLM2 | ShardedModel,
    batches: Iterable[Sequence[Any]],
    config: TrainConfig,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    log: Sink | None = None,
    after_step: Callable[[int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[StepLog]:
    """Train until the batches or `config.steps` are used up; returns the log of every step.

    A batch is one step in the `internevo` layout, `[data, labels]`: `data["input_ids"]` (micro_num, P) int64,
    `data["cu_seqlens"]` a list of micro_num (n+1,) int32, `data["indexes"]` (micro_num, P) int64, `labels`
    (micro_num, P) int64; `data["step"]`, if present, is the plan step, else steps count from 0. The batches of a
    `ShardedModel` are those of its data rank, the same on all ranks of a tensor group. A model alone is trained by this
    process alone.
    Pass the `optimizer` whose state a resumed run goes on with. `log` is told each step (by default rank 0 prints it),
    `after_step` the next step's number, on every rank. A step with a gradient that is not finite, or with no trained
    token, leaves weights and optimizer as they were and says so in its log.
    Raises Mismatch for ids outside the model's vocabulary and FloatingPointError after more than `config.max_skips`
    steps in a row without a finite gradient.
    """
    sharded = model if isinstance(model, ShardedModel) else plain(model)
    optimizer = optimizer or make_optimizer(sharded, config)
    log = log or (print_step if sharded.groups.world.rank == 0 else quiet)
    sharded.model.train()
    logs: list[StepLog] = []
    skips, meter = 0, _Meter(sharded, clock)
    for count, (data, labels) in enumerate(batches):
        step = int(data.get("step", count))
        if step >= config.steps:
            break
        loss, norm, counts, skipped = run_step(sharded, optimizer, config, data, labels, step)
        rates, mfu = meter.read(labels.numel(), counts)
        entry = StepLog(step, loss, norm, learning_rate(config, step), *rates, skipped, mfu)
        log(entry)
        logs.append(entry)
        skips = 0 if math.isfinite(norm) else skips + 1
        if skips > config.max_skips:
            raise FloatingPointError(
                f"steps up to {step} gave {skips} gradients in a row that are not finite: "
                "go back to a checkpoint before them, or lower peak_lr"
            )
        if after_step is not None:
            after_step(step + 1)
        if step + 1 >= config.steps:
            break
    return logs


class _Meter:
    """The rates of all ranks together since it was last read."""

    def __init__(self, sharded: ShardedModel, clock: Callable[[], float]) -> None:
        self._sharded, self._clock, self._last = sharded, clock, clock()
        self._peak = peak_flops(next(sharded.model.parameters()).device)

    def read(self, tokens: int, counts: StepCounts) -> tuple[tuple[float, float], float]:
        """Tokens and trained tokens per second, and MFU, of a step; `tokens` is this rank's count."""
        now = self._clock()
        seconds, self._last = now - self._last, now
        groups = self._sharded.groups
        mfu = counts.flops / (seconds * self._peak * groups.world.size) if self._peak else 0.0
        return (tokens * groups.data.size / seconds, counts.trained / seconds), mfu


def run_step(
    sharded: ShardedModel,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    data: dict[str, Any],
    labels: Tensor,
    step: int,
) -> tuple[float, float, StepCounts, str]:
    """One step: its loss, the norm of its gradient, what was counted and, if it was skipped, why. Collective."""
    check_vocabulary(data["input_ids"], labels, sharded.model.config.vocab_size, step)
    sharded.model.zero_grad()
    counts = count_step(labels, sharded, config.loss_reduction, data["cu_seqlens"])
    losses = accumulate_gradients(sharded, data, labels, counts.divisors, bf16=config.bf16)
    sum_gradients(sharded)
    norm = gradient_norm(sharded)
    loss = float(all_reduce(losses.sum(), sharded.mode.sum_loss))
    skipped = ""
    if not math.isfinite(norm):
        what, packs = "loss", packs_not_finite(losses, sharded)
        if not packs:
            again = gradients_by_pack(sharded, data, labels, counts.divisors, bf16=config.bf16)
            what, packs = "gradient", packs_not_finite(again, sharded)
        skipped = f"gradient norm is {norm}" + (f", {what} is not finite in {packs}" if packs else "")
    elif counts.trained == 0:
        skipped = "no trained token"
    else:
        update(sharded, optimizer, learning_rate(config, step), config.clip_norm, norm)
    return loss, norm, counts, skipped


@torch.no_grad()
def update(sharded: ShardedModel, optimizer: torch.optim.Optimizer, lr: float, clip_norm: float, norm: float) -> None:
    """Scale the gradients to at most `clip_norm`, given their global norm, and step."""
    scale = min(1.0, clip_norm / (norm + 1e-6))
    if scale < 1:
        torch._foreach_mul_([x.grad for x in sharded.model.parameters() if x.grad is not None], scale)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


def check_vocabulary(input_ids: Tensor, labels: Tensor, vocab_size: int, step: int) -> None:
    """Raise Mismatch for an input id or trained label outside [0, vocab_size).

    Labels are looked at too: a pack's last may be a token of the next pack.
    """
    for name, ids in (("input id", input_ids), ("label", labels.masked_fill(labels == IGNORE, 0))):
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= vocab_size:
            raise Mismatch(
                f"{name} {low if low < 0 else high} in step {step} is outside the model's vocabulary of {vocab_size}",
                "train a model with the vocabulary of the dataset's tokenizer, or plan over another dataset",
            )
