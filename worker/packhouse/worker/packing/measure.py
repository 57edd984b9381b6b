"""What is measured on a plan's packs, part by part, so that no pass needs all of them."""

from dataclasses import dataclass, field

import numpy as np

from packhouse.client.pack_table import PackTable
from packhouse.client.plan import Steps
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.packing.compiled import compiled
from packhouse.worker.packing.segments import Ids, Int32, Int64

FILLS = (0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.999, 0.9999, 1.0)
"""Bounds of the histogram of fills."""

TOKENS, TRAINED, UNKNOWN, LONG, SHARDS = range(5)
"""Columns of the numbers of a step: labels are an upper bound where some are UNKNOWN."""

LONG_SQUARES, SHORT_SQUARES, SPLIT = range(3)


@dataclass(frozen=True, slots=True)
class Samples:
    """What is known of the samples: (samples,) but for ``starts``."""

    lengths: Int32
    """tokens after the overlong policy"""
    starts: Int64
    """(shards + 1,), the first sample of each shard"""
    labels: Int32 | None
    """labels of the whole sample; None where all tokens of all samples are trained"""
    whole: Int32 | None
    """tokens before the overlong policy; None with labels"""


@dataclass(slots=True)
class Measures:
    """The numbers of the steps seen so far, in order."""

    spec: PlanSpec
    samples: Samples
    watched: Ids = field(default_factory=lambda: np.zeros(0, np.int64))
    """numbers of packs, empty ones not counted, whose costs are kept"""
    steps: list[Int64] = field(default_factory=list)
    rank_cost: list[Int64] = field(default_factory=list)
    micro_high: list[Int64] = field(default_factory=list)
    pack_cost: list[Int64] = field(default_factory=list)
    totals: Int64 = field(default_factory=lambda: np.zeros(3, np.int64))
    by_shard: Int64 = field(init=False)
    """(shards, 2): tokens, and samples that begin there"""
    nearby: Int64 = field(init=False)
    """(stretches,): for each 2**shift samples, the last shard that begins at the first of them or before"""
    shift: int = field(init=False)
    _rising: Ids = field(init=False)
    packs: int = 0
    empty: int = 0
    segments: int = 0
    longest: int = 0
    whole_tokens: int = 0
    whole_packs: int = 0
    fills: Int64 = field(default_factory=lambda: np.zeros(len(FILLS), np.int64))

    def __post_init__(self) -> None:
        self._rising = np.sort(self.watched)
        starts = self.samples.starts
        shards, samples = len(starts) - 1, int(starts[-1])
        self.by_shard = np.zeros((shards, 2), np.int64)
        self.shift = max(samples // shards, 1).bit_length() - 1
        stretches = np.arange((samples >> self.shift) + 1) << self.shift
        self.nearby = np.searchsorted(starts, stretches, side="right") - 1

    def add(self, table: PackTable, *, cut: bool) -> None:
        """Take in the packs of some whole steps; ``cut`` tells whether a segment may be a part of a sample."""
        spec, width = self.spec, self.spec.ranks * self.spec.micro_batches
        scanned = self._scanned(table, width, cut=cut)
        self.steps.append(scanned)
        cost = table.cost.reshape(-1, spec.ranks, spec.micro_batches)
        self.rank_cost.append(cost.sum(axis=2))
        self.micro_high.append(cost.max(axis=1).sum(axis=1))
        sizes = np.diff(table.offsets)
        self._watch(table.cost[sizes > 0])
        self.packs += int(np.count_nonzero(sizes))
        self.empty += int(np.count_nonzero(sizes == 0))
        self.segments += len(table.sample)
        self.longest = max(self.longest, int(sizes.max(initial=0)))
        full = (sizes.reshape(-1, width) > 0).all(axis=1)
        self.whole_packs += int(full.sum()) * width
        self.whole_tokens += int(scanned[full, TOKENS].sum())
        bounds = np.floor(np.array(FILLS) * spec.pack_length)
        self.fills += np.bincount(np.searchsorted(bounds, table.tokens[sizes > 0]), minlength=len(FILLS))

    def _watch(self, cost: Int64) -> None:
        low, high = np.searchsorted(self._rising, [self.packs, self.packs + len(cost)])
        self.pack_cost.append(cost[self._rising[low:high] - self.packs])

    def watched_cost(self) -> Int64:
        """Return the costs of the packs ``watched``."""
        return np.concatenate(self.pack_cost)[np.searchsorted(self._rising, self.watched)]

    def _scanned(self, table: PackTable, width: int, *, cut: bool) -> Int64:
        known, none = self.samples, np.zeros(0, np.int32)
        # Whole samples are as long as their segments: a random read for each is saved.
        lengths = known.lengths if cut else none
        segments = table.offsets, table.sample, table.start, table.length, lengths
        labels = none if known.labels is None else known.labels
        whole = none if known.whole is None else known.whole
        shards = known.starts, self.nearby, self.shift
        bounds = width, self.spec.pack_length // 8, _sample_end(self.spec)
        return _scan(*segments, labels, whole, *shards, *bounds, self.totals, self.by_shard)

    def table(self) -> Steps:
        """Return what a plan stores of its steps."""
        steps = np.concatenate(self.steps)
        trained = np.where(steps[:, UNKNOWN] > 0, -1, steps[:, TRAINED])
        return Steps(np.ascontiguousarray(steps[:, TOKENS]), trained, np.concatenate(self.rank_cost))


def _sample_end(spec: PlanSpec) -> int:
    return spec.sample_limit if spec.strategy == "internevo_unpacked" else 2**31


@compiled
def _scan(
    offsets: Int64,
    sample: Ids,
    start: Int32,
    length: Int32,
    lengths: Int32,
    known: Int32,
    whole: Int32,
    starts: Int64,
    nearby: Int64,
    shift: int,
    width: int,
    long: int,
    sample_end: int,
    totals: Int64,
    by_shard: Int64,
) -> Int64:
    """Return the numbers of each step, (steps, 5), and add to ``totals`` and ``by_shard``."""
    steps = (len(offsets) - 1) // width
    numbers = np.zeros((steps, 5), np.int64)
    last = np.full(len(by_shard), -1, np.int64)
    for step in range(steps):
        row = numbers[step]
        for i in range(offsets[step * width], offsets[(step + 1) * width]):
            item, n = sample[i], np.int64(length[i])
            size = np.int64(lengths[item]) if len(lengths) else n
            row[TOKENS] += n
            if size > long:
                row[LONG] += n
                totals[LONG_SQUARES] += n * n
            else:
                totals[SHORT_SQUARES] += n * n
            totals[SPLIT] += start[i] == 0 and n < size
            # The last token of a sample has no next one to learn; a sentence of internevo_unpacked ends with its row.
            labels = n if start[i] + n < min(size, sample_end) else n - 1
            # Of a part of a sample that is trained in part, only the most is known.
            if len(known) and known[item] < whole[item] - 1:
                labels = min(labels, np.int64(known[item]))
                row[UNKNOWN] += n < whole[item] and labels > 0
            row[TRAINED] += labels
            shard = nearby[item >> shift]
            while starts[shard + 1] <= item:
                shard += 1
            row[SHARDS] += last[shard] != step
            last[shard] = step
            by_shard[shard, 0] += n
            by_shard[shard, 1] += start[i] == 0
    return numbers
