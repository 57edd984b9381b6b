"""How evenly packs load the ranks, and what other strategies and orders would give on the same samples."""

import math

import numpy as np
import numpy.typing as npt

from packhouse.client.wire_plans import Balance, PlanSpec
from packhouse.worker.packing.best_fit import COPIES, LENGTH, PACKS, PARENT, place
from packhouse.worker.packing.length_grouped import by_rank, length_grouped
from packhouse.worker.packing.segments import Ids, Int64
from packhouse.worker.packing.shuffle import GROUPS, first_shuffled, shuffled

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
    return evenness(by_step.sum(axis=2), by_step.max(axis=1).sum(axis=1))


def evenness(rank_cost: Int64, micro_high: Int64) -> Balance:
    """Return how even steps are: ``rank_cost`` (steps, ranks), and (steps,) the sum of each micro-batch's greatest."""
    total, ranks = rank_cost.sum(axis=1), rank_cost.shape[1]
    step, micro = excess(rank_cost.max(axis=1), total, ranks), excess(micro_high, total, ranks)
    return Balance(step_mean=mean(step), step_p99=p99(step), micro_mean=mean(micro), micro_p99=p99(micro))


def best_fit_costs(counts: Int64, spec: PlanSpec) -> Int64:
    """Return the costs of the packs ``compared`` of those that best_fit makes of the histogram ``counts``."""
    groups = place(counts, spec.pack_length, spec.max_segments)
    length = groups[:, LENGTH]
    cost = groups[:, COPIES] * (spec.cost.token + spec.cost.square * length) * length
    for group, parent in enumerate(groups[:, PARENT].tolist()):
        if parent >= 0:
            cost[group] += cost[parent]
    # A pack's group by its place among all: of many packs only those that are compared are looked up.
    chosen = compared(int(groups[:, PACKS].sum()), spec)
    return cost[np.searchsorted(np.cumsum(groups[:, PACKS]), chosen, side="right")]


def compared(count: int, spec: PlanSpec) -> Ids:
    """Return which of ``count`` packs are compared in other orders: of very many as many as tell the difference."""
    return first_shuffled(count, MOST, spec.seed or 0, 0, GROUPS) if count > MOST else np.arange(count)


def orders(cost: Int64, spec: PlanSpec, name: str) -> dict[str, Balance]:
    """Return how even packs of ``cost`` are in shuffled and in length_grouped order; a last short step is left out."""
    ranks, micro, seed = spec.ranks, spec.micro_batches, spec.seed or 0
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
