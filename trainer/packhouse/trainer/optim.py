"""What turns gradients into an update: AdamW, the learning-rate schedule and their settings."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import ConfigDict
from torch import nn

from packhouse.trainer.parallel.sharded import ShardedModel
from packhouse.trainer.zero import SharedAdamW, decay_groups


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Settings of a training run; raises ValueError for ones that cannot work.

    `steps` is the plan step at which training stops, whichever step it starts from; `bf16` computes in bfloat16 on
    float32 weights; `max_skips` is how many steps in a row may be skipped for a gradient that is not finite.
    `loss_reduction` is the mean over the step's trained "token"s, or over its "micro_batch"es' means.
    `shard_optimizer` keeps each parameter's optimizer state on one data rank only.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    steps: int
    peak_lr: float = 3e-4
    warmup_steps: int = 0
    schedule: Literal["constant", "cosine"] = "constant"
    final_lr_share: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip_norm: float = 1.0
    bf16: bool = False
    max_skips: int = 10
    loss_reduction: Literal["token", "micro_batch"] = "token"
    shard_optimizer: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}: train for at least 1")
        if not 0 <= self.warmup_steps <= self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} must lie between 0 and steps {self.steps}")
        if self.schedule not in ("constant", "cosine"):
            raise ValueError(f'schedule "{self.schedule}" is unknown: use "constant" or "cosine"')
        if self.loss_reduction not in ("token", "micro_batch"):
            raise ValueError(f'loss_reduction "{self.loss_reduction}" is unknown: use "token" or "micro_batch"')
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm {self.clip_norm} must be positive: use math.inf to clip nothing")


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of plan step `step` (from 0): linear warm-up to the peak, then constant or a half cosine down.

    It depends on the step alone, so a resumed run goes on at the rate at which the unbroken one would be.
    """
    if step < config.warmup_steps:
        return config.peak_lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.peak_lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    share = config.final_lr_share + (1 - config.final_lr_share) * (1 + math.cos(math.pi * progress)) / 2
    return config.peak_lr * share


def make_optimizer(model: nn.Module | ShardedModel, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over all parameters that train; vectors, which here are the norms, do not decay.

    With `config.shard_optimizer` and a `ShardedModel` it holds the state of this rank's own parameters only. The fused
    kernel is used where torch has one.
    """
    whole = model.model if isinstance(model, ShardedModel) else model
    trained = {name: parameter for name, parameter in whole.named_parameters() if parameter.requires_grad}
    settings: dict[str, Any] = {"lr": config.peak_lr, "betas": config.betas, "eps": config.eps}
    settings["fused"] = all(parameter.device.type in ("cpu", "cuda") for parameter in trained.values())
    if config.shard_optimizer and isinstance(model, ShardedModel) and model.mode.sum_cut.size > 1:
        return SharedAdamW(trained, config.weight_decay, model.mode.sum_cut, **settings)
    return torch.optim.AdamW(decay_groups(trained.values(), config.weight_decay), **settings)
