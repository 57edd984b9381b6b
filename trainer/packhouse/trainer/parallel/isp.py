"""Mode `isp`: all weights cut by columns over the weight group and gathered before use; activations cut by sequence.

Per layer, forward: all-gather of five weights; all-to-all of queries, of keys with values, and of attention's result.
Backward: the five weights are gathered again, their gradients are reduce-scattered, and the three exchanges run the
other way. The weight size is independent of the sequence size. The embedding is cut along the hidden size.

Source: Internlm sequence parallelism (arXiv 2401.09149); attention exchanges heads for tokens as in DeepSpeed-Ulysses
(arXiv 2309.14509).
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packhouse.trainer.loss import cross_entropy
from packhouse.trainer.model import InternLM2, ModelConfig
from packhouse.trainer.parallel.collectives import (
    exchange,
    gather_cut_backward,
    linked,
    own_part,
    reduce_scatter,
)
from packhouse.trainer.parallel.gathers import Gathers
from packhouse.trainer.parallel.groups import Group, Groups
from packhouse.trainer.parallel.precision import compute_dtype
from packhouse.trainer.parallel.shard import Edge
from packhouse.trainer.parallel.sharded import Mode, Options

LAYER = ("attention.wqkv", "attention.wo", "feed_forward.w1", "feed_forward.w3", "feed_forward.w2")
"""A layer's linears in the order in which they run."""
SEQUENCE, HEADS = 1, 2


def mode(model: InternLM2, groups: Groups, options: Options) -> Mode:
    """The edges of `isp`; raises ValueError for heads that the sequence size does not divide."""
    sequence, gathers = groups.tensor, make_gathers(model, groups, options)
    check_heads(model.config, sequence.size)
    weight = Edge(cut=0, around=partial(_linear, gathers))
    linears = dict.fromkeys(("wqkv", "wo", "w1", "w3", "w2", "output"), weight)
    shared = {"tok_embeddings": Edge(cut=1, around=partial(_embedding, gathers)), **linears}
    gathered = Edge(0, None, partial(gather_cut_backward, group=sequence, dim=SEQUENCE), weight.around)
    return Mode(
        edges={
            **shared,
            "rotary_emb": Edge(before=partial(_own_lengths, sequence)),
            "inner_attn": Edge(
                before=partial(_scatter_heads, sequence),
                after=partial(exchange, group=sequence, scatter=SEQUENCE, gather=HEADS),
            ),
            "output": weight if options.parallel_output else gathered,
        },
        whole_edges={
            **shared,
            "inner_cross_attn": Edge(
                before=partial(_own_heads, sequence),
                after=partial(gather_cut_backward, group=sequence, dim=HEADS),
            ),
        },
        shard=groups.weight,
        sum_cut=groups.weight_data,
        sum_whole=groups.world,
        loss=cross_entropy,
        sum_loss=groups.world if options.parallel_output else groups.data,
        cut_sequence=True,
        cut_data=True,
        cut_labels=options.parallel_output,
    )


def make_gathers(model: InternLM2, groups: Groups, options: Options) -> Gathers:
    """The gathers of a model's weights, a unit being the embedding, a layer or the head."""
    layers = [[f"model.layers.{i}.{name}" for name in LAYER] for i in range(model.config.num_layers)]
    units = [["model.tok_embeddings"], *layers, ["output"]]
    modules = {name: model.get_submodule(name) for unit in units for name in unit}
    cuts = {name: int(isinstance(module, nn.Embedding)) for name, module in modules.items()}
    recomputed = frozenset(range(1, options.recompute_layers + 1))
    return Gathers(units, modules, cuts, groups.weight, recomputed=recomputed, overlap=options.overlap)


def check_heads(config: ModelConfig, size: int) -> None:
    """Raise ValueError unless heads can be dealt out equally, key/value heads being repeated where they are few."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % size or (kv_heads % size and size % kv_heads):
        raise ValueError(
            f"isp cannot deal {heads} query and {kv_heads} key/value heads to sp {size}: use an sp that divides "
            f"{heads} and is a divisor or a multiple of {kv_heads}"
        )


def _linear(gathers: Gathers, name: str, linear: nn.Linear, x: Tensor) -> Tensor:
    out: Tensor = _GatheredLinear.apply(x.to(compute_dtype(x)), linear.weight, gathers, name)  # type: ignore[no-untyped-call]
    return out


class _GatheredLinear(torch.autograd.Function):
    """A linear whose weight is whole only while it is used; between the passes the shard alone is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gathers: Gathers, name: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.gathers, ctx.name, ctx.dtype = gathers, name, weight.dtype
        return F.linear(x, gathers.take(name))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad,), (x,) = grads, ctx.saved_tensors
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            d_x = grad @ ctx.gathers.take(ctx.name, backward=True)
        if ctx.needs_input_grad[1]:
            # Widened before it is summed: partial sums in 16 bits would lose more than their transfer costs.
            whole = (grad.flatten(0, -2).T @ x.flatten(0, -2)).to(ctx.dtype)
            d_weight = reduce_scatter(whole, ctx.gathers.group, ctx.gathers.cuts[ctx.name])
        return d_x, d_weight, None, None


def _embedding(gathers: Gathers, name: str, embedding: nn.Embedding, input_ids: Tensor) -> Tensor:
    gathers.forget()
    dim = gathers.cuts[name]
    sum_gradient = partial(reduce_scatter, group=gathers.group, dim=dim)
    return F.embedding(input_ids, linked(embedding.weight, lambda _: gathers.take(name), sum_gradient))


def _repeated(kv: Tensor, size: int) -> Tensor:
    """Each key/value head, dim -2, next to its copies, so that each of `size` ranks gets one; sums their gradients."""
    return kv.repeat_interleave(max(1, size // kv.shape[-2]), dim=-2)


def _scatter_heads(group: Group, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """(1, T/sp, N, H) and (1, T/sp, K, H) twice to (1, T, N/sp, H) and (1, T, K/sp, H): keys and values go together."""
    q, k, v, *others = args
    kv = _repeated(torch.stack((k, v), dim=2), group.size)
    q = exchange(q, group, scatter=HEADS, gather=SEQUENCE)
    k, v = exchange(kv, group, scatter=3, gather=SEQUENCE).unbind(2)
    return q, k, v, *others


def _own_heads(group: Group, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of whole sequences, this rank's heads, so that each rank's cache holds its own keys and values only."""
    q, k, v, cache = args
    k, v = (_repeated(x, group.size) for x in (k, v))
    return *(own_part(x, group, HEADS) for x in (q, k, v)), cache


def _own_lengths(group: Group, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Segment lengths are counted from borders of the whole pack; the positions are those of this rank's part."""
    indexes, lengths = args
    return indexes, None if lengths is None else own_part(lengths, group, 0)
