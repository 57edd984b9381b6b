"""Process groups: which ranks share a sequence, which hold shards of one weight, and which see other data.

Ranks are laid out as InternEvo does: sequence (tensor) groups and weight groups are blocks of neighbouring ranks, data
groups take every tp-th rank and weight-data groups every wp-th. The sequence size is the tensor size; the weight size
differs from it in `isp` only.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Group:
    """Some ranks in rising order, and this process's place among them; `handle` is None where it is alone."""

    ranks: tuple[int, ...]
    rank: int = 0
    handle: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of this process."""

    world: Group
    tensor: Group
    """The ranks that work on the same packs: a sequence, or the heads of its attention, is cut over them."""
    data: Group
    """The ranks at the same place of their tensor group, each with packs of its own."""
    weight: Group
    """The ranks over which a weight is cut."""
    weight_data: Group
    """The ranks that hold the same shard of each weight."""


def rank_table(world: int, tp: int, wp: int) -> dict[str, list[tuple[int, ...]]]:
    """All groups of a world by kind; raises ValueError for sizes that do not divide it."""
    for name, size in (("tp", tp), ("wp", wp)):
        if size < 1 or world % size:
            raise ValueError(f"{name} {size} does not divide the world of {world} ranks: use a divisor of {world}")
    return {
        "world": [tuple(range(world))],
        "tensor": [tuple(range(first, first + tp)) for first in range(0, world, tp)],
        "data": [tuple(range(first, world, tp)) for first in range(tp)],
        "weight": [tuple(range(first, first + wp)) for first in range(0, world, wp)],
        "weight_data": [tuple(range(first, world, wp)) for first in range(wp)],
    }


def make_groups(tp: int = 1, wp: int | None = None, timeout: timedelta | None = None) -> Groups:
    """Create this process's groups; collective: all ranks call it, with equal sizes. Without `wp`, it is `tp`.

    `timeout` is how long a rank waits for the others, by default the backend's own.

    Where torch.distributed is not initialized the world is this process alone.
    """
    running = dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if running else (0, 1)
    made: dict[tuple[bool, tuple[int, ...]], dist.ProcessGroup | None] = {}
    own: dict[str, Group] = {}
    for kind, all_ranks in rank_table(world, tp, tp if wp is None else wp).items():
        for ranks in all_ranks:
            # Weights travel while activations do: among the same ranks they have a channel of their own, so that
            # neither waits behind the other. Every rank creates every group, in the same order: torch asks for it.
            key = kind == "weight", ranks
            if key not in made:
                made[key] = dist.new_group(list(ranks), timeout=timeout) if running and len(ranks) > 1 else None
            if rank in ranks:
                own[kind] = Group(ranks, ranks.index(rank), made[key])
    return Groups(**own)
