"""Mode `fsp`: as `msp`, but the input of wqkv, w1, w3 and the head is gathered again in the backward pass, not kept.

The numbers are those of `msp` to the bit; what differs is three more all-gathers per layer in the backward pass and
the memory of the gathered inputs.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packhouse.trainer.model import ModelConfig
from packhouse.trainer.parallel.collectives import all_gather, reduce_scatter
from packhouse.trainer.parallel.groups import Group, Groups
from packhouse.trainer.parallel.msp import SEQUENCE, around_columns
from packhouse.trainer.parallel.precision import compute_dtype
from packhouse.trainer.parallel.shard import Edge
from packhouse.trainer.parallel.sharded import Mode, Options, check_heads


def mode(config: ModelConfig, groups: Groups, options: Options) -> Mode:
    """The edges of `fsp`; raises ValueError for heads that the group's size does not divide."""
    check_heads("fsp", groups.tensor.size, config.num_heads, config.num_kv_heads)
    columns = Edge(cut=0, around=partial(_forward, groups.tensor))
    return around_columns(config, groups, options, columns)


def _forward(group: Group, name: str, linear: nn.Linear, x: Tensor) -> Tensor:
    dtype = compute_dtype(x)
    out: Tensor = _GatherAgain.apply(x.to(dtype), linear.weight.to(dtype), group)  # type: ignore[no-untyped-call]
    return out


class _GatherAgain(torch.autograd.Function):
    """A linear of the gathered sequence that keeps this rank's part of it only."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, weight: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(part, weight)
        ctx.group = group
        return F.linear(all_gather(part, group, SEQUENCE), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,), (part, weight) = grads, ctx.saved_tensors
        d_part = d_weight = None
        if ctx.needs_input_grad[0]:
            d_part = reduce_scatter(grad @ weight, ctx.group, SEQUENCE)
        if ctx.needs_input_grad[1]:
            x = all_gather(part, ctx.group, SEQUENCE)
            d_weight = grad.flatten(0, -2).T @ x.flatten(0, -2)
        return d_part, d_weight, None
