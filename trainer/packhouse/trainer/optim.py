"""What turns gradients into an update: AdamW, the learning-rate schedule and their settings."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Settings of a training run; raises ValueError for ones that cannot work.

    `steps` is the plan step at which training stops, whichever step it starts from; `bf16` computes in bfloat16 on
    float32 weights; `max_skips` is how many steps in a row may be skipped for a gradient that is not finite.
    """

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

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}: train for at least 1")
        if not 0 <= self.warmup_steps <= self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} must lie between 0 and steps {self.steps}")
        if self.schedule not in ("constant", "cosine"):
            raise ValueError(f'schedule "{self.schedule}" is unknown: use "constant" or "cosine"')
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


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over all parameters that train; vectors, which here are the norms, do not decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.peak_lr, betas=config.betas, eps=config.eps)
