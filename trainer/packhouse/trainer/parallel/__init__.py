"""Parallel modes: each cuts a plain InternLM2 over ranks and leaves its numbers as they are."""

from functools import partial
from typing import Literal

import torch
from torch.utils.checkpoint import checkpoint

from packhouse.trainer.loss import cross_entropy
from packhouse.trainer.model import InternLM2, ModelConfig
from packhouse.trainer.parallel import fsp, isp, msp, mtp
from packhouse.trainer.parallel.groups import Group, Groups, make_groups
from packhouse.trainer.parallel.shard import Placement, attach, cut_weights, draw_weights
from packhouse.trainer.parallel.sharded import Mode, Options, ShardedModel

ModeName = Literal["mtp", "msp", "fsp", "isp"]

__all__ = ["Groups", "ModeName", "Options", "ShardedModel", "build", "make_groups", "parallelize", "plain"]


def parallelize(
    model: InternLM2, groups: Groups, name: ModeName = "mtp", options: Options | None = None
) -> ShardedModel:
    """Cut a whole model in place and attach the mode's operations; raises ValueError for sizes that do not divide.

    The model may be on the meta device. A weight size other than the tensor size is for `isp` alone.
    """
    options = options or Options()
    if name != "isp" and groups.weight.size != groups.tensor.size:
        raise ValueError(
            f"{name} cuts weights over its tensor group of {groups.tensor.size} and cannot use wp "
            f"{groups.weight.size}: leave wp out, or use isp"
        )
    mode = _mode(model, groups, name, options)
    cuts = cut_weights(model, mode.edges, mode.shard)
    placements = {
        parameter: Placement(cuts.get(parameter), mode.shard, mode.sum_cut if parameter in cuts else mode.sum_whole)
        for parameter, _ in model.named_parameters()
    }
    _recompute(model, options.recompute_layers)
    return ShardedModel(model, groups, mode, placements, attach(model, mode.edges))


def plain(model: InternLM2) -> ShardedModel:
    """The whole model on this rank alone, whatever the world."""
    alone = Group((0,))
    mode = Mode({}, {}, shard=alone, sum_cut=alone, sum_whole=alone, loss=cross_entropy, sum_loss=alone)
    placements = {name: Placement(None, alone, alone) for name, _ in model.named_parameters()}
    return ShardedModel(model, Groups(alone, alone, alone, alone, alone), mode, placements, [])


def build(
    config: ModelConfig,
    groups: Groups,
    name: ModeName = "mtp",
    options: Options | None = None,
    *,
    seed: int | None = 0,
    device: torch.device | None = None,
) -> ShardedModel:
    """A new model that never was whole: cut on the meta device, then given this rank's part of the seed's weights.

    With seed None its weights are whatever lay in memory: for one that is loaded next.
    """
    with torch.device("meta"):
        model = InternLM2(config)
    sharded = parallelize(model, groups, name, options)
    model.to_empty(device=device or torch.device("cpu"))
    if seed is not None:
        draw_weights(model, sharded.placements, seed)
    return sharded


def _mode(model: InternLM2, groups: Groups, name: ModeName, options: Options) -> Mode:
    if name == "isp":
        return isp.mode(model, groups, options)
    return {"mtp": mtp.mode, "msp": msp.mode, "fsp": fsp.mode}[name](model.config, groups, options)


def _recompute(model: InternLM2, layers: int) -> None:
    """Let the first layers keep their input only; there is no dropout, so no random state has to be kept."""
    for block in list(model.model.layers)[:layers]:
        again = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        setattr(block, "forward", again)  # noqa: B010
