"""How two plans differ: their requests, their figures, and which packs they share."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash

from packhouse.client.pack_table import Int64, PackTable, decode_steps
from packhouse.client.plan import PlanSource
from packhouse.client.wire import Wire

STEPS_AT_ONCE = 256


class PlanDiff(Wire):
    """What differs between plan ``a`` and plan ``b``; pairs are a's value and b's."""

    a: str
    b: str
    spec: dict[str, tuple[Any, Any]]
    """Fields of the requests that differ."""
    figures: dict[str, tuple[Any, Any]]
    """Numbers of the reports that differ."""
    packs: tuple[int, int]
    packs_in_common: int
    """Packs of the same segments in the same order, wherever they stand."""
    steps_in_common: int
    """Steps of the same packs at the same number."""
    first_step: int | None
    """First step that differs; null where all are the same."""


def plan_diff(a: PlanSource, b: PlanSource) -> PlanDiff:
    """Compare two plans pack by pack; holds 16 bytes a pack, whatever the plans' sizes.

    Samples are compared by their numbers, so packs are the same only where the datasets are.
    """
    heads = a.header, b.header
    packs = _packs(a), _packs(b)
    datasets = [[dataset.id for dataset in head.datasets] for head in heads]
    common = _common(*packs) if datasets[0] == datasets[1] else 0
    steps = min(head.steps for head in heads)
    same = np.zeros(steps, np.bool_)
    if datasets[0] == datasets[1] and heads[0].packs_per_step == heads[1].packs_per_step:
        width = heads[0].packs_per_step
        first, second = (one[: steps * width].reshape(steps, width) for one in packs)
        same = (first == second).all(axis=1)
    differs = np.flatnonzero(~same)
    more = steps if heads[0].steps != heads[1].steps else None
    specs = [head.spec.model_dump(mode="json") for head in heads]
    reports = [head.report.model_dump(exclude={"compared", "datasets", "lengths", "fills", "cost"}) for head in heads]
    return PlanDiff(
        a=heads[0].id,
        b=heads[1].id,
        spec=_differing(*specs),
        figures=_differing(*reports),
        packs=(heads[0].report.packs, heads[1].report.packs),
        packs_in_common=common,
        steps_in_common=int(same.sum()),
        first_step=int(differs[0]) if len(differs) else more,
    )


def _differing(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (a.get(name), b.get(name)) for name in a | b if a.get(name) != b.get(name)}


def _packs(plan: PlanSource) -> Int64:
    """Return a 64-bit digest of each pack, in order; 0 for an empty one."""
    parts = [np.zeros(0, np.int64)]
    for first in range(0, plan.header.steps, STEPS_AT_ONCE):
        batch = plan.slice(first, min(first + STEPS_AT_ONCE, plan.header.steps), 0, 1)
        parts.append(np.fromiter(_digests(decode_steps(batch).packs), np.int64))
    return np.concatenate(parts)


def _digests(packs: PackTable) -> Iterator[int]:
    rows = np.stack([packs.sample, packs.start, packs.length], axis=1).astype(np.int64)
    for begin, end in zip(packs.offsets[:-1].tolist(), packs.offsets[1:].tolist(), strict=True):
        yield xxhash.xxh3_64_intdigest(rows[begin:end].data) - 2**63 if end > begin else 0


def _common(a: Int64, b: Int64) -> int:
    values, counts = np.unique(a[a != 0], return_counts=True)
    others, more = np.unique(b[b != 0], return_counts=True)
    _, left, right = np.intersect1d(values, others, assume_unique=True, return_indices=True)
    return int(np.minimum(counts[left], more[right]).sum())
