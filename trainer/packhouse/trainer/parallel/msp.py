"""Mode `msp`: as `mtp`, with the activations between the linears cut along the sequence over the same group.

Per layer, forward: all-gather of the input of wqkv, w1 and w3, reduce-scatter after wo and w2. Backward: all-gather of
the output gradients of wo and w2, reduce-scatter of the input gradients of wqkv, w1 and w3. The gathered inputs are
kept for the backward pass.
"""

from functools import partial

from packhouse.trainer.model import ModelConfig
from packhouse.trainer.parallel import mtp
from packhouse.trainer.parallel.collectives import (
    cut_gather_backward,
    gather_cut_backward,
    gather_sum_backward,
    sum_scatter,
)
from packhouse.trainer.parallel.groups import Groups
from packhouse.trainer.parallel.precision import narrowed
from packhouse.trainer.parallel.shard import Edge, first_argument
from packhouse.trainer.parallel.sharded import Mode, Options, check_heads, tensor_loss

SEQUENCE = 1


def mode(config: ModelConfig, groups: Groups, options: Options) -> Mode:
    """The edges of `msp`; raises ValueError for heads that the group's size does not divide."""
    group = groups.tensor
    check_heads("msp", group.size, config.num_heads, config.num_kv_heads)
    columns = Edge(cut=0, before=first_argument(narrowed(partial(gather_sum_backward, group=group, dim=SEQUENCE))))
    return around_columns(config, groups, options, columns)


def around_columns(config: ModelConfig, groups: Groups, options: Options, columns: Edge) -> Mode:
    """The mode of which `columns` is the edge of the linears that are cut by columns."""
    group = groups.tensor
    gather_last = partial(gather_cut_backward, group=group, dim=-1)
    split = partial(cut_gather_backward, group=group, dim=SEQUENCE)
    rows = Edge(cut=1, after=partial(sum_scatter, group=group, dim=SEQUENCE))
    output = columns if options.parallel_output else Edge(0, columns.before, gather_last, columns.around)
    edges = {
        "tok_embeddings": Edge(cut=1, after=lambda x: split(gather_last(x))),
        **{"wqkv": columns, "wo": rows, "w1": columns, "w3": columns, "w2": rows},
        "output": output,
    }
    return Mode(
        edges=edges,
        # One new token cannot be cut along the sequence; the weights are cut as in `mtp`, so its edges serve.
        whole_edges=mtp.mode(config, groups, options).whole_edges,
        shard=group,
        sum_cut=groups.data,
        sum_whole=groups.world,
        loss=tensor_loss(groups, options.parallel_output),
        sum_loss=groups.data,
        cut_sequence=True,
    )
