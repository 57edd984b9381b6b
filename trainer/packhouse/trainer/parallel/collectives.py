"""The collectives, plain and as differentiable functions: what runs forward, and its counterpart backward.

Every call to torch.distributed by the model's edges is in this file. A group of one never calls it. All sums are SUM:
an average over data parallelism is taken once, in the divisor of the loss, because AVG is not there on every backend.

Shape legend: n ranks of the group, B rows, T tokens of a row, D the last dimension.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from packhouse.trainer.parallel.groups import Group

# torch 2.13 renamed both; the older releases know only the older names.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"

Operation = Callable[[Tensor], Tensor]


def all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """The sum of all ranks' `x`, on every rank; `x` itself is left as it is."""
    if group.size == 1:
        return x
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, op=op, group=group.handle)
    return out


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """The ranks' parts side by side along `dim`, in rank order, on every rank."""
    return start_gather(x, group, dim)()


def start_gather(x: Tensor, group: Group, dim: int) -> Callable[[], Tensor]:
    """Start `all_gather` without waiting for it; what is returned waits and gives the result."""
    if group.size == 1:
        return lambda: x
    part = x.movedim(dim, 0).contiguous()
    whole = part.new_empty(group.size * part.shape[0], *part.shape[1:])
    work = getattr(dist, GATHER)(whole, part, group=group.handle, async_op=True)

    def wait(kept: Tensor = part) -> Tensor:
        """The result; `kept` is what is sent, which must stay alive until it has arrived."""
        work.wait()
        return whole.movedim(0, dim)

    return wait


def reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's part along `dim` of the sum of all ranks' `x`."""
    if group.size == 1:
        return x
    check_divides(x.shape[dim], group.size, "tokens or rows")
    whole = x.movedim(dim, 0).contiguous()
    part = whole.new_empty(whole.shape[0] // group.size, *whole.shape[1:])
    getattr(dist, SCATTER)(part, whole, group=group.handle)
    return part.movedim(0, dim)


def all_to_all(x: Tensor, group: Group, scatter: int, gather: int) -> Tensor:
    """Cut `x` along `scatter`, send part r to rank r, and join what came along `gather`, in rank order."""
    if group.size == 1:
        return x
    check_divides(x.shape[scatter], group.size, "heads or tokens")
    sent = torch.stack(x.chunk(group.size, dim=scatter))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group.handle)
    return torch.cat(received.unbind(), dim=gather)


def own_part(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's part of `x` along `dim`, with no communication."""
    if group.size == 1:
        return x
    check_divides(x.shape[dim], group.size, "tokens, rows or heads")
    return x.chunk(group.size, dim=dim)[group.rank].contiguous()


def check_divides(length: int, size: int, what: str) -> None:
    """Raise ValueError unless `length` can be cut into `size` equal parts."""
    if length % size:
        raise ValueError(
            f"{length} {what} cannot be cut equally over {size} ranks: choose a multiple of {size}, "
            "or another parallel size"
        )


class _Linked(torch.autograd.Function):
    """An operation whose backward is another operation, given by the caller."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Operation, backward: Operation) -> Tensor:
        ctx.operation = backward
        out = forward(x)
        return out.view_as(out) if out is x else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.operation(grads[0]), None, None


def linked(x: Tensor, forward: Operation, backward: Operation) -> Tensor:
    """`forward(x)`, with `backward` applied to the gradient on its way back."""
    out: Tensor = _Linked.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return out


def same(x: Tensor) -> Tensor:
    """The operation that does nothing."""
    return x


def sum_forward(x: Tensor, group: Group) -> Tensor:
    """Sum over the ranks; the gradient passes as it is, since it is the same on all of them."""
    return linked(x, partial(all_reduce, group=group), same)


def sum_backward(x: Tensor, group: Group) -> Tensor:
    """`x` as it is; its gradient is the sum of the ranks', each of which used it for other outputs."""
    return linked(x, same, partial(all_reduce, group=group))


def gather_sum_backward(x: Tensor, group: Group, dim: int) -> Tensor:
    """Gather along `dim`; each rank used the whole for other outputs, so gradients are summed, then cut."""
    return linked(x, partial(all_gather, group=group, dim=dim), partial(reduce_scatter, group=group, dim=dim))


def sum_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """Sum over the ranks and keep this rank's part along `dim`; gradients are gathered."""
    return linked(x, partial(reduce_scatter, group=group, dim=dim), partial(all_gather, group=group, dim=dim))


def gather_cut_backward(x: Tensor, group: Group, dim: int) -> Tensor:
    """Gather along `dim`; all ranks then compute the same, so each keeps its part of the gradient."""
    return linked(x, partial(all_gather, group=group, dim=dim), partial(own_part, group=group, dim=dim))


def cut_gather_backward(x: Tensor, group: Group, dim: int) -> Tensor:
    """Keep this rank's part along `dim`; the parts' gradients are gathered."""
    return linked(x, partial(own_part, group=group, dim=dim), partial(all_gather, group=group, dim=dim))


def exchange(x: Tensor, group: Group, scatter: int, gather: int) -> Tensor:
    """`all_to_all`, whose backward is the exchange the other way."""
    forward = partial(all_to_all, group=group, scatter=scatter, gather=gather)
    return linked(x, forward, partial(all_to_all, group=group, scatter=gather, gather=scatter))
