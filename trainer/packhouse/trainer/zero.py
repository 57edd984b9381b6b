"""AdamW whose state is dealt out over the ranks that hold the same parameters: ZeRO stage 1.

Each rank updates the parameters that it owns and sends them to the others. Whole parameters are dealt out, the largest
first to the rank with least so far; gradients are summed on all ranks as without it, so the numbers stay the same.
Source: ZeRO, arXiv 1910.02054, section 5.1.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from packhouse.trainer.parallel.groups import Group


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: matrices, which decay, and vectors, which do not."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in parameters:
        (matrices if parameter.ndim > 1 else vectors).append(parameter)
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def deal_out(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """The owner of each parameter, the same on every rank: largest first, to whom has least so far."""
    loads, owners = [0] * ranks, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner = loads.index(min(loads))
        owners[name] = owner
        loads[owner] += sizes[name]
    return owners


class SharedAdamW(torch.optim.AdamW):
    """AdamW over the parameters that this rank of `group` owns; a step ends with all ranks holding all of them."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], weight_decay: float, group: Group, **settings: Any
    ) -> None:
        self.owners = deal_out({name: parameter.numel() for name, parameter in parameters.items()}, group.size)
        self._all = dict(parameters)
        self._group = group
        owned = [parameter for name, parameter in parameters.items() if self.owners[name] == group.rank]
        super().__init__(decay_groups(owned, weight_decay), **settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the own parameters, then send each to the other ranks. Collective."""
        super().step(closure)
        for name, parameter in self._all.items():
            data: Tensor = parameter.data
            dist.broadcast(data, src=self._group.ranks[self.owners[name]], group=self._group.handle)
