"""A plan's report: what was asked for, what became of it, and what is measured on the packs."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from packhouse.client.wire_plans import Balance, CostCurve, DatasetShare, Histogram, PlanReport, PlanSpec
from packhouse.worker.packing import balance, measure
from packhouse.worker.packing.compiled import compiled
from packhouse.worker.packing.mixture import Draw
from packhouse.worker.packing.segments import Ids, Int32, Int64
from packhouse.worker.packing.shuffle import SAMPLES, shuffled

POINTS = 200
"""Most points of the cost curve."""
ENOUGH = 8
"""Fewest steps from which randomness is told."""


def asked(lengths: Int32, drawn: list[Draw], spec: PlanSpec) -> dict[str, int]:
    """Return the counts that follow from samples of ``lengths`` tokens, before the overlong policy, and the draws."""
    total: dict[str, int] = {}
    for draw in drawn:
        part = lengths[draw.first : draw.last]
        for times, subset in ((draw.passes, part), (1, part[_extra(draw, spec)])):
            for name, count in _losses(subset, spec).items():
                total[name] = total.get(name, 0) + times * count
    return total


def _extra(draw: Draw, spec: PlanSpec) -> Ids:
    """Return the samples of the draw's last pass, which does not take all."""
    if not draw.extra:
        return np.zeros(0, np.int32)
    return shuffled(draw.last - draw.first, spec.seed, draw.passes, SAMPLES, *draw.key)[: draw.extra]


def _losses(lengths: Int32, spec: PlanSpec) -> dict[str, int]:
    limit = spec.sample_limit
    over = lengths[lengths > limit]
    tokens = int(over.sum(dtype=np.int64))
    cut, left_out = spec.overlong == "truncate", spec.overlong == "drop"
    return {
        "samples": len(lengths),
        "zero_length": int(np.count_nonzero(lengths == 0)),
        "truncated_samples": len(over) * cut,
        "truncated_tokens": (tokens - limit * len(over)) * cut,
        "dropped_samples": len(over) * left_out,
        "tokens": int(lengths.sum(dtype=np.int64)),
    }


def report(
    spec: PlanSpec,
    counts: dict[str, int],
    measures: measure.Measures,
    compared: dict[str, Balance],
    shares: Sequence[DatasetShare],
    lengths: Histogram,
) -> PlanReport:
    """Return the report; ``counts`` are those of ``asked``. What was neither packed nor truncated was dropped."""
    steps = np.concatenate(measures.steps)
    tokens = int(steps[:, measure.TOKENS].sum())
    slots = (measures.packs + measures.empty) * spec.pack_length
    whole = measures.whole_packs * spec.pack_length
    dropped = counts["tokens"] - counts["truncated_tokens"] - tokens
    return PlanReport(
        **{**counts, "tokens": tokens, "dropped_tokens": dropped},
        trained_tokens=int(steps[:, measure.TRAINED].sum()),
        trained_exact=not steps[:, measure.UNKNOWN].any(),
        packs=measures.packs,
        empty_packs=measures.empty,
        steps=len(steps),
        segments=measures.segments,
        padding_tokens=slots - tokens,
        padding=(slots - tokens) / slots,
        fill=measures.whole_tokens / whole if whole else tokens / slots,
        split_samples=int(measures.totals[measure.SPLIT]),
        segments_per_pack_mean=measures.segments / measures.packs,
        segments_per_pack_max=measures.longest,
        **_evenness(measures, spec.ranks),
        compared=compared,
        randomness=_randomness(steps, measures.totals),
        shards_per_step_mean=int(steps[:, measure.SHARDS].sum()) / len(steps),
        datasets=list(shares),
        lengths=lengths,
        fills=Histogram(bounds=list(measure.FILLS), counts=measures.fills.tolist()),
        cost=_curve(np.concatenate(measures.rank_cost)),
    )


def _evenness(measures: measure.Measures, ranks: int) -> dict[str, Any]:
    cost, micro_high = np.concatenate(measures.rank_cost), np.concatenate(measures.micro_high)
    even = balance.evenness(cost, micro_high)
    everything = sum(cost.sum(axis=1).tolist())
    return {
        "imbalance_mean": even.step_mean,
        "imbalance_p99": even.step_p99,
        "micro_imbalance_mean": even.micro_mean,
        "micro_imbalance_p99": even.micro_p99,
        "excess": sum(micro_high.tolist()) * ranks / everything - 1 if everything else 0.0,
    }


def _randomness(steps: Int64, totals: Int64) -> float | None:
    """Return the variance of the steps' share of long samples over what steps of random samples have.

    A share is a ratio of sums; its variance over random steps is, to first order, the sum over segments of
    n² (1 if long - share)² over (tokens of all · tokens of a step).
    """
    size, long = steps[:, measure.TOKENS], steps[:, measure.LONG]
    full = size * 2 > size.max(initial=0)
    size, long = size[full], long[full]
    tokens = int(size.sum())
    if len(size) < ENOUGH:
        return None
    share = int(long.sum()) / tokens
    expected = int(totals[measure.LONG_SQUARES]) * (1 - share) ** 2 + int(totals[measure.SHORT_SQUARES]) * share**2
    expected /= tokens * (tokens / len(size))
    return round(balance.mean((long / size - share) ** 2) / expected, 6) if expected else None


def length_histogram(lengths: Int32) -> Histogram:
    """Return how many samples have up to 0, 1, 2, 4, 8, … tokens."""
    counts = _by_power(lengths)
    counts = counts[: int(np.flatnonzero(counts)[-1]) + 1] if counts.any() else counts[:1]
    bounds = [0.0, *(float(1 << bit) for bit in range(len(counts) - 1))]
    return Histogram(bounds=bounds, counts=counts.tolist())


@compiled
def _by_power(lengths: Int32) -> Int64:
    counts = np.zeros(33, np.int64)
    for length in lengths:
        place, bound = 0, 0
        while bound < length:
            bound = max(2 * bound, 1)
            place += 1
        counts[place] += 1
    return counts


def _curve(cost: Int64) -> CostCurve:
    steps, ranks = cost.shape
    run = -(-steps // POINTS)
    firsts = np.arange(0, steps, run)
    unit = sum(cost.sum(axis=1).tolist()) / (steps * ranks) or 1.0
    sizes = np.diff(firsts, append=steps)
    mean = np.add.reduceat(cost.sum(axis=1), firsts) / (sizes * ranks)

    def points(values: Any) -> list[float]:
        return np.round(values / unit, 6).tolist()  # type: ignore[no-any-return]

    return CostCurve(
        steps=firsts.tolist(),
        low=points(np.minimum.reduceat(cost.min(axis=1), firsts)),
        mean=points(mean),
        high=points(np.maximum.reduceat(cost.max(axis=1), firsts)),
    )
