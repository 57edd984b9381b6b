"""The gradients of one step: every micro-batch forward and backward, then the sums and the norm over ranks."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from packhouse.client.layouts import load_micro_batch, packed_data_normalizer
from packhouse.trainer.flops import step_flops
from packhouse.trainer.loss import count_trained_tokens
from packhouse.trainer.parallel.collectives import all_gather, all_reduce
from packhouse.trainer.parallel.groups import Group
from packhouse.trainer.parallel.sharded import ShardedModel

Reduction = Literal["token", "micro_batch"]
BUCKET_NUMBERS = 1 << 25
"""Gradients are summed over ranks in pieces of about this many numbers: few calls, and a bounded copy."""


@dataclass(frozen=True, slots=True)
class StepCounts:
    """How a step's loss is divided: `divisors` has one entry per micro-batch of this rank."""

    divisors: list[int]
    trained: int
    """Trained tokens of the whole step, on all ranks."""
    flops: float = 0.0
    """Operations of the whole step, on all ranks: segments, and with them attention, differ between data ranks."""


def count_step(
    labels: Tensor, sharded: ShardedModel, reduction: Reduction, cu_seqlens: Sequence[Tensor] = ()
) -> StepCounts:
    """Count over all data ranks; `labels` (micro_num, T) and `cu_seqlens` are this rank's. Collective.

    "token": every trained token of the step weighs the same. "micro_batch": the mean over the micro-batches that train
    anything of each one's own mean, as InternEvo has it. Both are already the average over data parallelism.
    """
    own = [count_trained_tokens(row) for row in labels]
    device = next(sharded.model.parameters()).device
    flops = step_flops(sharded.model.config, cu_seqlens)
    # In float64, which holds the counts exactly, and operations that int64 would not hold.
    totals = torch.tensor([sum(own), sum(count > 0 for count in own), flops], dtype=torch.float64, device=device)
    trained, filled, flops = all_reduce(totals, sharded.groups.data).tolist()
    divisors = [int(trained if reduction == "token" else count * filled) for count in own]
    return StepCounts(divisors, int(trained), flops)


def accumulate_gradients(
    sharded: ShardedModel, data: dict[str, Any], labels: Tensor, divisors: Sequence[int], *, bf16: bool = False
) -> Tensor:
    """Run every micro-batch forward and backward; gradients add up in the parameters.

    Returns this rank's part of each micro-batch's loss, (micro_num,).
    """
    device = next(sharded.model.parameters()).device
    losses = []
    for (pack, targets), divisor in zip(micro_batches(data, labels, device), divisors, strict=True):
        loss = micro_loss(sharded, pack, targets, divisor, bf16=bf16)
        torch.autograd.backward(loss)
        losses.append(loss.detach())
    # One transfer at the end, by the caller: reading each loss at once would make a GPU wait after every micro-batch.
    return torch.stack(losses) if losses else torch.zeros(0, device=device)


def micro_loss(
    sharded: ShardedModel, pack: dict[str, Any], targets: Tensor, divisor: int, *, bf16: bool = False
) -> Tensor:
    """This rank's part of the loss of one normalized micro-batch, packed or unpacked."""
    pack, targets = sharded.own_data(with_rows(pack), targets)
    with torch.autocast(targets.device.type, dtype=torch.bfloat16, enabled=bf16):
        logits = sharded.model(pack["input_ids"], pack["cu_seqlens"], pack["indexes"], pack["max_seqlen"])
        return sharded.mode.loss(logits, targets, divisor)


def with_rows(pack: dict[str, Any]) -> dict[str, Any]:
    """An unpacked micro-batch, which has one sample a row, with its positions and borders; a packed one as it is.

    They are made of whole rows, before any rank takes its part: a part does not know where it starts.
    """
    if "cu_seqlens" in pack:
        return pack
    rows, tokens = pack["input_ids"].shape
    device = pack["input_ids"].device
    borders = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device=device)
    return {**pack, "indexes": torch.arange(tokens, device=device), "cu_seqlens": borders, "max_seqlen": tokens}


def micro_batches(
    data: dict[str, Any], labels: Tensor, device: torch.device
) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """The packs of a step one by one, as the model takes them, on `device`."""
    batch = [{"step": 0, **data}, labels]
    for offset in range(len(labels)):
        pack, targets = packed_data_normalizer(*load_micro_batch(batch, offset))
        moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in pack.items()}
        yield moved, targets.to(device)


@torch.no_grad()
def sum_gradients(sharded: ShardedModel) -> None:
    """Add up each parameter's gradient over the ranks that computed parts of it. Collective; in place."""
    by_group: dict[tuple[int, ...], tuple[Group, list[Tensor]]] = {}
    for name, parameter in sharded.model.named_parameters():
        group = sharded.placements[name].sum_over
        if group.size > 1 and parameter.requires_grad:
            if parameter.grad is None:  # a rank without a micro-batch takes part all the same
                parameter.grad = torch.zeros_like(parameter)
            by_group.setdefault(group.ranks, (group, []))[1].append(parameter.grad)
    for group, gradients in by_group.values():
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat, group=group.handle)
            for gradient, summed in zip(bucket, torch.split(flat, [x.numel() for x in bucket]), strict=True):
                gradient.copy_(summed.view_as(gradient))


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for gradient in gradients:
        if bucket and (sum(x.numel() for x in bucket) + gradient.numel() > BUCKET_NUMBERS):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


@torch.no_grad()
def gradient_norm(sharded: ShardedModel) -> float:
    """The norm of all gradients together: shards add up over their ranks, whole parameters count once. Collective."""
    parameters = dict(sharded.model.named_parameters())
    device = next(iter(parameters.values())).device
    squares = torch.zeros(2, dtype=torch.float64, device=device)
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            squares[int(sharded.placements[name].cut is None)] += (
                torch.linalg.vector_norm(parameter.grad, dtype=wide) ** 2
            )
    cut, whole = squares
    return math.sqrt(float(all_reduce(cut, sharded.mode.shard) + whole))


def packs_not_finite(values: Tensor, sharded: ShardedModel) -> str:
    """Name the micro-batches whose loss, or norm, is not finite, by data rank where there are several. Collective."""
    world = sharded.groups.world
    table = all_gather(values.detach()[None], world, 0) if world.size > 1 else values[None]
    named: dict[int, set[int]] = {}
    for rank, row in enumerate(table):
        bad = [index for index, value in enumerate(row.tolist()) if not math.isfinite(value)]
        if bad:
            named.setdefault(rank // sharded.groups.tensor.size, set()).update(bad)
    several = sharded.groups.data.size > 1
    return " and ".join(
        f"packs {sorted(packs)}" + (f" of data rank {rank}" if several else "") for rank, packs in sorted(named.items())
    )


def gradients_by_pack(
    sharded: ShardedModel, data: dict[str, Any], labels: Tensor, divisors: Sequence[int], *, bf16: bool = False
) -> Tensor:
    """The norm of each micro-batch's own gradient on this rank, (micro_num,); all are computed again. Collective.

    Where a weight group of `isp` spans data ranks, their gradients are one sum, and all of them see what is in it.
    """
    norms = []
    for row, divisor in enumerate(divisors):
        sharded.model.zero_grad()
        one = {name: x[row : row + 1] if name != "step" else x for name, x in data.items()}
        accumulate_gradients(sharded, one, labels[row : row + 1], [divisor], bf16=bf16)
        gradients = [x.grad for x in sharded.model.parameters() if x.grad is not None]
        norms.append(torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64) for x in gradients]).sum())
    sharded.model.zero_grad()
    return torch.stack(norms)
