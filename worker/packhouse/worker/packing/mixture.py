"""Mixtures: how often each dataset's samples are drawn, and whose pack comes next."""

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

from packhouse.client.errors import InvalidRequest
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.packing.compiled import compiled
from packhouse.worker.packing.segments import Int32, Int64


@dataclass(frozen=True, slots=True)
class Draw:
    """How often the samples ``first:last`` are drawn: ``passes`` times each, and ``extra`` of them once more."""

    first: int
    last: int
    passes: int
    extra: int = 0
    key: tuple[int, ...] = ()
    """What tells its shuffles from those of the others; empty where there is one draw only."""

    @property
    def count(self) -> int:
        """How many samples are drawn."""
        return self.passes * (self.last - self.first) + self.extra


def draws(spec: PlanSpec, lengths: Int32, bounds: list[int]) -> list[Draw]:
    """Return what is drawn of each dataset; ``bounds`` (datasets + 1,) is where their samples begin in ``lengths``.

    Without weights or epochs for each, the datasets are one. A dataset of n samples and weight w is drawn
    round(n e) times, e = w · (tokens of all · epochs) / (tokens of it · sum of weights): fractions, so nothing is lost
    to rounding before the end. Raises ``InvalidRequest`` for weights that do not fit the datasets.
    """
    if spec.weights is None and spec.dataset_epochs is None:
        return [Draw(bounds[0], bounds[-1], spec.epochs)]
    name, factors = ("weights", spec.weights) if spec.weights is not None else ("dataset_epochs", spec.dataset_epochs)
    assert factors is not None
    ranges = list(pairwise(bounds))
    tokens = [int(lengths[first:last].sum(dtype=np.int64)) for first, last in ranges]
    for dataset, factor, size in zip(spec.datasets, factors, tokens, strict=True):
        if not size:
            raise InvalidRequest(f"dataset {dataset} has no tokens to pack", f"leave it and its part of {name} out")
        if not factor:
            raise InvalidRequest(f"dataset {dataset} has 0 in {name}", "leave the dataset out, or give it more")
    shares = [Fraction(factor) for factor in factors]
    if spec.weights is not None:
        per_weight = Fraction(sum(tokens)) / sum(shares)
        shares = [share * per_weight / size for share, size in zip(shares, tokens, strict=True)]
    drawn = []
    for number, (share, (first, last)) in enumerate(zip(shares, ranges, strict=True)):
        count = round(share * spec.epochs * (last - first))
        if not count:
            raise InvalidRequest(
                f"dataset {spec.datasets[number]} has {last - first:,} samples, and its part of {name} draws none",
                "give it more, or leave the dataset out",
            )
        drawn.append(Draw(first, last, *divmod(count, last - first), (number,)))
    return drawn


def interleaved(counts: list[int]) -> Int32:
    """Return which source each of ``sum(counts)`` places goes to, so that source i has ``counts[i]`` evenly spread.

    After any number t of places, source i has had its share t · counts[i] / total to within one, so any run of places
    has it to within two. Source: the k-th place of a source lies in the window from floor(k total / count) to
    ceil((k + 1) total / count); always take the open window that ends first (Tijdeman, The chairman assignment
    problem, 1980; Baruah et al., Proportionate progress, 1996).
    """
    return _interleaved(np.array(counts, np.int64))


@compiled
def _interleaved(counts: Int64) -> Int32:
    total = counts.sum()
    places, taken = np.empty(total, np.int32), np.zeros(len(counts), np.int64)
    for place in range(total):
        best, ends = -1, total + 1
        for i in range(len(counts)):
            if taken[i] < counts[i] and taken[i] * total // counts[i] <= place:
                end = -(-(taken[i] + 1) * total // counts[i])
                if end < ends:
                    best, ends = i, end
        places[place] = best
        taken[best] += 1
    return places
