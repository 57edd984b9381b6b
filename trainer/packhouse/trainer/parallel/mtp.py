"""Mode `mtp`: weights cut by columns and rows over the tensor group; every rank keeps the whole sequence.

Per layer, forward: all-reduce after wo and w2. Backward: all-reduce of the input gradients of wqkv, w1 and w3.
"""

from functools import partial

from packhouse.trainer.model import ModelConfig
from packhouse.trainer.parallel.collectives import gather_cut_backward, sum_backward, sum_forward
from packhouse.trainer.parallel.groups import Groups
from packhouse.trainer.parallel.precision import narrowed
from packhouse.trainer.parallel.shard import Edge, first_argument
from packhouse.trainer.parallel.sharded import Mode, Options, check_heads, tensor_loss


def mode(config: ModelConfig, groups: Groups, options: Options) -> Mode:
    """The edges of `mtp`; raises ValueError for heads that the group's size does not divide."""
    group = groups.tensor
    check_heads("mtp", group.size, config.num_heads, config.num_kv_heads)
    gather_last = partial(gather_cut_backward, group=group, dim=-1)
    columns = Edge(cut=0, before=first_argument(narrowed(partial(sum_backward, group=group))))
    rows = Edge(cut=1, after=partial(sum_forward, group=group))
    layers = {"wqkv": columns, "wo": rows, "w1": columns, "w3": columns, "w2": rows}
    edges = {"tok_embeddings": Edge(cut=1, after=gather_last), **layers, "output": columns}
    whole = {**edges, "output": Edge(cut=0, before=columns.before, after=gather_last)}
    return Mode(
        edges=edges if options.parallel_output else whole,
        whole_edges=whole,
        shard=group,
        sum_cut=groups.data,
        sum_whole=groups.data,
        loss=tensor_loss(groups, options.parallel_output),
        sum_loss=groups.data,
    )
