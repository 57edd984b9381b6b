"""A plan gone over more than once: when its steps are used up, the next pass has them in an order of its own."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packhouse.client.digest import digest_json
from packhouse.client.plan import PlanSource, check_slice

Int64 = npt.NDArray[np.int64]


class RepeatedPlan:
    """The first `steps` steps of `plan`, pass after pass, as a plan of `total` steps.

    Pass p is the steps p * steps to (p + 1) * steps. The first keeps the plan's order; that of a later one follows from
    the plan's id and p alone, so a step's number says what is in it, and a run resumes in any pass as it does in the
    first. The packs stay as they were planned.
    """

    def __init__(self, plan: PlanSource, steps: int, total: int) -> None:
        self.header = replace(plan.header, steps=total)
        self._plan, self._steps = plan, steps

    def slice(self, start: int, stop: int, rank: int, world: int) -> pa.RecordBatch:
        """As `PlanSource.slice`. Steps that lie together in the plan are asked for together."""
        check_slice(self.header, start, stop, rank, world)
        numbers = np.arange(start, stop)
        own = np.array(
            [_order(self.header.id, self._steps, n // self._steps)[n % self._steps] for n in range(start, stop)]
        )
        runs = np.split(own, np.flatnonzero(np.diff(own) != 1) + 1) if len(own) else [np.zeros(0, np.int64)]
        ends = [(int(run[0]), int(run[-1]) + 1) if len(run) else (0, 0) for run in runs]
        parts = [self._plan.slice(*end, rank, world) for end in ends]
        table = pa.Table.from_batches(parts).combine_chunks()
        width = table.num_rows // max(len(numbers), 1)
        renumbered = table.set_column(0, table.schema.field(0), pa.array(np.repeat(numbers, width), pa.int64()))
        batches: list[pa.RecordBatch] = renumbered.to_batches()
        return batches[0] if batches else parts[0]


@lru_cache(2)
def _order(plan_id: str, steps: int, number: int) -> Int64:
    """The plan's steps in the order of pass `number`: a sort by a keyed 64-bit mix, which no library's update changes.

    Source: the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    numbers = np.arange(steps)
    if number == 0:
        return numbers
    mixed = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(
        int(digest_json([plan_id, number])[:16], 16)
    )
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable")
