"""How evenly packs load the ranks, and what other strategies and orders would give on the same samples."""

import math

import numpy as np
import numpy.typing as npt

from packhouse.client.wire_plans import Balance, PlanSpec
from packhouse.worker.packing.best_fit import COPIES, LENGTH, PACKS, PARENT, place
from packhouse.worker.packing.length_grouped import by_rank, length_grouped
from packhouse.worker.packing.segments import Ids, Int64
from packhouse.worker.packing.shuffle import GROUPS, shuffled

Floats = npt.NDArray[np.float64]

MOST = 1 << 18
"""Most packs whose orders are compared."""


def excess(high: Int64, total: Int64, sharers: int) -> Floats:
    """Return ``high`` over the mean of ``sharers`` that hold ``total``; 1 where they hold nothing."""
    return np.where(total > 0, high * float(sharers) / np.maximum(total, 1), 1.0)


def mean(values: Floats) -> float:
    """Return the mean, summed exactly, so that it does not depend on how a machine orders an addition."""
    return math.fsum(values.tolist()) / len(values)


def p99(values: Floats) -> float:
    """Return the 99th percentile: the smallest value that 99 % do not exceed."""
    return float(np.sort(values)[-(-99 * len(values) // 100) - 1])


def balance(cost: Int64, ranks: int, micro_batches: int) -> Balance:
    """Return how even packs of ``cost`` (packs,) are, in whole steps with a rank's packs side by side."""
    by_step = cost.reshape(-1, ranks, micro_batches)
    total = by_step.sum(axis=(1, 2))
    step = excess(by_step.sum(axis=2).max(axis=1), total, ranks)
    micro = excess(by_step.max(axis=1).sum(axis=1), total, ranks)
    return Balance(step_mean=mean(step), step_p99=p99(step), micro_mean=mean(micro), micro_p99=p99(micro))


def best_fit_costs(counts: Int64, spec: PlanSpec) -> Int64:
    """Return the costs of the packs that best_fit makes of the histogram ``counts``, without making them."""
    groups = place(counts, spec.pack_length, spec.max_segments)
    length = groups[:, LENGTH]
    cost = groups[:, COPIES] * (spec.cost.token + spec.cost.square * length) * length
    for group, parent in enumerate(groups[:, PARENT].tolist()):
        if parent >= 0:
            cost[group] += cost[parent]
    return np.repeat(cost, groups[:, PACKS])


def orders(cost: Int64, spec: PlanSpec, name: str) -> dict[str, Balance]:
    """Return how even packs of ``cost`` are in shuffled and in length_grouped order; a last short step is left out.

    Of very many packs only so many are compared as tell the difference.
    """
    ranks, micro, seed = spec.ranks, spec.micro_batches, spec.seed or 0
    if len(cost) > MOST:
        cost = cost[shuffled(len(cost), seed, 0, GROUPS)[:MOST]]
    whole = len(cost) // (ranks * micro) * ranks * micro
    if not whole:
        return {}

    def groups(count: int, stretch: int) -> Ids:
        return shuffled(count, seed, 0, GROUPS, stretch)

    order = shuffled(len(cost), seed, 0, GROUPS)
    grouped = length_grouped(cost, order, ranks, micro, groups)[:whole]
    return {
        f"{name}, shuffled": balance(cost[order[:whole]], ranks, micro),
        f"{name}, length_grouped": balance(cost[grouped[by_rank(whole, ranks, micro)]], ranks, micro),
    }
