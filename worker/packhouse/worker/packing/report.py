"""The numbers of a plan's report that are measured on its packs: padding, balance over ranks, shards touched."""

import math
from typing import Any

import numpy as np

from packhouse.client.plan import PackTable
from packhouse.client.wire import PlanSpec
from packhouse.worker.packing.compiled import compiled
from packhouse.worker.packing.segments import Int32, Int64


def measured(table: PackTable, spec: PlanSpec, shard_of: Int32) -> dict[str, Any]:
    """Return the fields of ``PlanReport`` that follow from the packs of whole steps.

    ``shard_of`` is the shard of each sample, int32. Sums of fractions are rounded once, so that they do not depend on
    how a machine orders an addition.
    """
    per_step = spec.ranks * spec.micro_batches
    steps = len(table) // per_step
    tokens = int(table.tokens.sum(dtype=np.int64))
    slots = len(table) * spec.pack_length
    segments = np.diff(table.offsets)
    packs = int(np.count_nonzero(segments))
    excess = _imbalance(table.cost.reshape(steps, spec.ranks, spec.micro_batches).sum(axis=2))
    shards = _shards_touched(table.offsets[::per_step], table.sample, shard_of)
    return {
        "tokens": tokens,
        "packs": packs,
        "empty_packs": len(table) - packs,
        "steps": steps,
        "segments": len(table.sample),
        "padding_tokens": slots - tokens,
        "padding": (slots - tokens) / slots,
        "segments_per_pack_mean": len(table.sample) / packs,
        "segments_per_pack_max": int(segments.max()),
        "imbalance_mean": math.fsum(excess.tolist()) / steps,
        "imbalance_p99": float(np.sort(excess)[-(-99 * steps // 100) - 1]),
        "shards_per_step_mean": shards / steps,
    }


def _imbalance(cost: Int64) -> Any:
    """Return for costs (steps, ranks) the greatest over the mean of each step, float64; 1 for a step without cost."""
    total = cost.sum(axis=1)
    return np.where(total > 0, cost.max(axis=1) * float(cost.shape[1]) / np.maximum(total, 1), 1.0)


@compiled
def _shards_touched(bounds: Int64, sample: Int64, shard_of: Int32) -> int:
    """Return the sum over steps of the number of shards touched; ``bounds`` is where the steps' segments begin."""
    last = np.full(shard_of.max() + 1, -1, np.int64)
    touched = 0
    for step in range(len(bounds) - 1):
        for i in range(bounds[step], bounds[step + 1]):
            shard = shard_of[sample[i]]
            if last[shard] != step:
                last[shard] = step
                touched += 1
    return touched
