"""Sends shards of weights ahead of their use: while one unit of the model computes, the next one's weights arrive.

A unit is what is gathered together: the embedding, one layer, the head. The modules of a unit are in the order in which
they run, which is not the order in which they were made. A gathered weight lives until it was used once.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from itertools import pairwise

import torch
from torch import Tensor, nn

from packhouse.trainer.parallel.collectives import start_gather
from packhouse.trainer.parallel.groups import Group
from packhouse.trainer.parallel.precision import compute_dtype


class Pass(Enum):
    """In which run over the model a weight is used."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"


Key = tuple[str, Pass]


class Gathers:
    """The gathered weights of one model: at most those of two units are alive, and only one's without overlap.

    `units` lists names in order of execution, and `recomputed` the units whose forward pass runs again in the backward
    pass; `modules` holds the modules by name, each with a `weight` that is cut along the dimension in `cuts`.
    """

    def __init__(
        self,
        units: Sequence[Sequence[str]],
        modules: dict[str, nn.Module],
        cuts: dict[str, int],
        group: Group,
        *,
        recomputed: frozenset[int] = frozenset(),
        overlap: bool = True,
    ) -> None:
        self.modules = modules
        self.cuts = cuts
        self.group = group
        self.pending: dict[Key, Callable[[], Tensor]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._following = _following(units, recomputed) if overlap and group.size > 1 else {}

    def take(self, name: str, *, backward: bool = False) -> Tensor:
        """The whole weight of a module, in the dtype it computes in, for one use; starts what comes next."""
        weight, kind = self._weight(name), _current_pass(backward)
        if kind is Pass.FORWARD:
            narrow = isinstance(self.modules[name], nn.Linear)
            self._dtypes[name] = compute_dtype(weight) if narrow else weight.dtype
        wait = self.pending.pop((name, kind), None) or self._start(name)
        for following in self._following.get((name, kind), ()):
            if following not in self.pending:
                self.pending[following] = self._start(following[0])
        return wait()

    def forget(self) -> None:
        """Drop what was sent ahead and never used, as after an error in the middle of a pass."""
        self.pending.clear()

    def _weight(self, name: str) -> Tensor:
        weight = self.modules[name].weight
        assert isinstance(weight, Tensor)
        return weight.detach()

    def _start(self, name: str) -> Callable[[], Tensor]:
        weight = self._weight(name)
        narrow = compute_dtype(weight) if isinstance(self.modules[name], nn.Linear) else weight.dtype
        return start_gather(weight.to(self._dtypes.get(name, narrow)), self.group, self.cuts[name])


def _current_pass(backward: bool) -> Pass:
    if backward:
        return Pass.BACKWARD
    # A forward pass inside a backward pass is a recomputation; torch's own checkpoint asks in the same way.
    return Pass.FORWARD if torch._C._current_graph_task_id() == -1 else Pass.RECOMPUTE


def _following(units: Sequence[Sequence[str]], recomputed: frozenset[int]) -> dict[Key, list[Key]]:
    """What to send at each use.

    Forward, a unit's second module sends the next unit's weights: by then the layer's attention has exchanged its
    heads, which must not wait behind weights. Backward, the first one to be used sends the previous unit's.
    """
    runs = [(number, Pass.FORWARD) for number in range(len(units))]
    for number in range(len(units) - 1, 0, -1):
        runs += [(number, Pass.RECOMPUTE)] * (number in recomputed) + [(number, Pass.BACKWARD)]
    table: dict[Key, list[Key]] = {}
    for (number, kind), (next_number, next_kind) in pairwise(runs):
        if kind is Pass.FORWARD and next_kind is not Pass.FORWARD:
            continue  # the loss lies between, and there may be no backward pass at all
        trigger = units[number][-1] if kind is Pass.BACKWARD else units[number][min(1, len(units[number]) - 1)]
        names = units[next_number] if next_kind is not Pass.BACKWARD else units[next_number][::-1]
        table[trigger, kind] = [(name, next_kind) for name in names]
    return table
