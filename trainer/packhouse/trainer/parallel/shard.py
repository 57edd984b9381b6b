"""Applies a table of edges to a plain model: cuts its weights, and puts operations before, after or around its modules.

An edge stands where a module's input or output crosses ranks. The model does not know: parameters keep their names and
become this rank's part, and operations are torch hooks or a replaced `forward` of one instance.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from packhouse.trainer.model import InternLM2, initial_weights
from packhouse.trainer.parallel.collectives import all_gather, check_divides, own_part
from packhouse.trainer.parallel.groups import Group

Undo = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Edge:
    """What happens at one kind of module.

    `cut` is the dimension along which its weight is cut; `before` maps its positional arguments, a tuple, to those it
    is given; `after` maps its result; `around` is called with the module's name, the module and the arguments, in place
    of its forward.
    """

    cut: int | None = None
    before: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None
    after: Callable[[Tensor], Tensor] | None = None
    around: Callable[..., Tensor] | None = None


Edges = Mapping[str, Edge]
"""Edges by the last part of a module's name: one entry serves all layers."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a parameter lies: `cut` over `shard`, or whole on every rank (None); gradients add up over `sum_over`."""

    cut: int | None
    shard: Group
    sum_over: Group


def first_argument(operation: Callable[[Tensor], Tensor]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A `before` that maps the first argument and passes the others on."""
    return lambda args: (operation(args[0]), *args[1:])


def edged_modules(model: nn.Module, edges: Edges) -> Iterator[tuple[str, nn.Module, Edge]]:
    """The modules that have an edge, by name."""
    for name, module in model.named_modules():
        edge = edges.get(name.rpartition(".")[2])
        if edge is not None:
            yield name, module, edge


def attach(model: nn.Module, edges: Edges) -> list[Undo]:
    """Put the edges' operations in place; calling what is returned takes them away again."""
    undo: list[Undo] = []
    for name, module, edge in edged_modules(model, edges):
        if edge.before is not None:
            undo.append(module.register_forward_pre_hook(partial(_before, edge.before)).remove)
        if edge.after is not None:
            undo.append(module.register_forward_hook(partial(_after, edge.after)).remove)
        if edge.around is not None:
            setattr(module, "forward", partial(edge.around, name, module))  # noqa: B010
            undo.append(partial(delattr, module, "forward"))
    return undo


def _before(operation: Callable[[tuple[Any, ...]], tuple[Any, ...]], module: nn.Module, args: Any) -> Any:
    return operation(args)


def _after(operation: Callable[[Tensor], Tensor], module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return operation(out)


def cut_weights(model: nn.Module, edges: Edges, group: Group) -> dict[str, int]:
    """Replace the weights that have a cut by this rank's parts; returns the dimension of each cut by parameter name.

    Raises ValueError, naming the parameter, where its size is not a multiple of the group's; nothing is cut then.
    """
    cuts = {f"{name}.weight": edge.cut for name, _, edge in edged_modules(model, edges) if edge.cut is not None}
    parameters = dict(model.named_parameters())
    for name, dim in cuts.items():
        check_divides(parameters[name].shape[dim], group.size, f"rows or columns of {name}")
    for name, dim in cuts.items():
        owner, _, leaf = name.rpartition(".")
        whole = parameters[name]
        part = own_part(whole.detach(), group, dim).clone()
        model.get_submodule(owner).register_parameter(leaf, nn.Parameter(part, whole.requires_grad))
    return cuts


def own_shard(whole: Tensor, placement: Placement) -> Tensor:
    """This rank's part of a whole parameter."""
    return whole if placement.cut is None else own_part(whole, placement.shard, placement.cut)


def whole_parameter(part: Tensor, placement: Placement) -> Tensor:
    """The whole of a parameter, or of its gradient, on every rank; collective."""
    return part if placement.cut is None else all_gather(part.detach(), placement.shard, placement.cut).contiguous()


@torch.no_grad()
def draw_weights(model: InternLM2, placements: Mapping[str, Placement], seed: int) -> None:
    """Give a model that was cut its parts of the plain model's weights of `seed`; one whole weight is alive at a time.

    Every rank of every mode starts from the same numbers, and draws all of them.
    """
    parameters = dict(model.named_parameters())
    with torch.device("meta"):
        plain = InternLM2(model.config)
    for name, weight in initial_weights(plain, seed):
        parameters[name].copy_(own_shard(weight, placements[name]))


@contextmanager
def exchanged(model: nn.Module, attached: list[Undo], edges: Edges, others: Edges) -> Iterator[None]:
    """Run with `others` in the place of `edges`, whose undo list is `attached` and is kept up to date."""
    for undo in attached:
        undo()
    attached[:] = attach(model, others)
    try:
        yield
    finally:
        for undo in attached:
            undo()
        attached[:] = attach(model, edges)
