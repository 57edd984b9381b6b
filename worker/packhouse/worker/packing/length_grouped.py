"""Sampler length_grouped: packs of like cost side by side, so that the ranks have as much to do at each micro-batch.

Source: XTuner's length-grouped sampler, as its documentation describes it: the shuffled packs are cut into stretches;
each is sorted by cost, cut into groups of one pack for each rank, and its groups are shuffled. Here only whole groups
are shuffled: a short one comes last, where XTuner may put it between others so that every later step mixes two groups.
"""

from collections.abc import Callable

import numpy as np

from packhouse.worker.packing.segments import Ids, Int64, narrow

STRETCH_STEPS = 50
"""Most steps of a stretch: grouping is local, so that the whole stays random."""
LEAST_STEPS = 4
"""Steps of a stretch where there are few packs; a quarter of them is less than two steps, and one sorts nothing."""


def length_grouped(cost: Int64, order: Ids, ranks: int, micro_batches: int, shuffle: Callable[[int, int], Ids]) -> Ids:
    """Return the packs ``order``, of ``cost``, group by group: (packs,), ``ranks`` packs a group.

    ``shuffle(count, stretch)`` gives the order of the groups of a stretch. Where the packs do not fill the last group,
    its packs are the last ones.
    """
    packs, per_step = len(order), ranks * micro_batches
    quarter = packs // (4 * per_step)
    stretch = (min(quarter, STRETCH_STEPS) if quarter > 1 else LEAST_STEPS) * per_step
    grouped, at = np.empty_like(order), 0
    rest: list[Ids] = []
    for number, first in enumerate(range(0, packs, stretch)):
        part = order[first : first + stretch]
        part = part[np.argsort(-cost[part], kind="stable")]
        groups = len(part) // ranks
        whole = groups * ranks
        grouped[at : at + whole] = part[:whole].reshape(groups, ranks)[shuffle(groups, number)].reshape(-1)
        rest.append(part[whole:])
        at += whole
    grouped[at:] = np.concatenate([*rest, order[:0]])
    return grouped


def by_rank(count: int, ranks: int, micro_batches: int) -> Ids:
    """Return the order of ``count`` packs, given group by group in whole steps, in which a rank's lie side by side."""
    steps = count // (ranks * micro_batches)
    return np.arange(count, dtype=narrow(count)).reshape(steps, micro_batches, ranks).swapaxes(1, 2).reshape(-1)
