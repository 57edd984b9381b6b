"""The figures of a dataset's page: read from its manifest once, in the background where that takes long."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from packhouse.client.format import Manifest, Receipt, read_manifest, read_meta
from packhouse.client.store import ReadStore
from packhouse.client.wire_plans import Histogram

LOOKED_AT = 64
"""Shards whose lengths are counted; of a dataset that has more, so many at even distances."""
KEPT = 512
"""Datasets whose figures are kept; they are some KB each, and never change."""
PATIENCE = 2.0
"""Seconds that a page waits for figures before it says that they are being counted."""


@dataclass(frozen=True, slots=True)
class DatasetFacts:
    """What a dataset is, in sums."""

    id: str
    recipe_digest: str
    recipe: Mapping[str, Any]
    vocab_size: int
    shards: int
    rows: int
    tokens: int
    trained_tokens: int
    bytes: int
    records: int
    rejected: Mapping[str, int]
    dropped: int
    truncated: int
    truncated_tokens: int
    split: int
    lengths: Histogram
    longest: int
    """Tokens of the longest sample that was looked at."""
    middle: int
    """Tokens of the median sample that was looked at."""
    looked_at: int
    """Shards that the lengths are from."""


class FactsOfDatasets:
    """The figures of datasets, kept once they are known. Any thread may call it."""

    def __init__(self, store: ReadStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Future[DatasetFacts]] = OrderedDict()
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="figures")

    def __call__(self, dataset_id: str, patience: float = PATIENCE) -> DatasetFacts | None:
        """Return the figures, or None if they are still being counted after ``patience`` seconds.

        Raises ``NotFound`` and ``Damaged``, which are not kept.
        """
        with self._lock:
            counting = self._known.get(dataset_id)
            if counting is None or (counting.done() and counting.exception() is not None):
                counting = self._known[dataset_id] = self._pool.submit(_facts, self._store, dataset_id)
            self._known.move_to_end(dataset_id)
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        wait([counting], patience)
        return counting.result() if counting.done() else None


def _facts(store: ReadStore, dataset_id: str) -> DatasetFacts:
    manifest = read_manifest(store, dataset_id)
    shards = manifest.shards
    looked_at = _evenly(shards, LOOKED_AT)
    lengths = _lengths(store, looked_at)
    return DatasetFacts(
        id=dataset_id,
        recipe_digest=manifest.recipe_digest,
        recipe=manifest.recipe,
        vocab_size=manifest.vocab_size,
        shards=len(shards),
        rows=manifest.rows,
        tokens=manifest.tokens,
        trained_tokens=sum(shard.trained_tokens for shard in shards),
        bytes=sum(shard.data.bytes + shard.meta.bytes for shard in shards),
        records=sum(shard.records for shard in shards),
        rejected=_rejected(manifest),
        dropped=sum(shard.dropped for shard in shards),
        truncated=sum(shard.truncated for shard in shards),
        truncated_tokens=sum(shard.truncated_tokens for shard in shards),
        split=sum(shard.split for shard in shards),
        lengths=_histogram(lengths),
        longest=int(lengths.max(initial=0)),
        middle=int(np.median(lengths)) if lengths.size else 0,
        looked_at=len(looked_at),
    )


def _rejected(manifest: Manifest) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for shard in manifest.shards:
        sums.update(shard.rejected)
    return dict(sums.most_common())


def _evenly(shards: Sequence[Receipt], count: int) -> Sequence[Receipt]:
    if len(shards) <= count:
        return shards
    return [shards[number * len(shards) // count] for number in range(count)]


def _lengths(store: ReadStore, shards: Sequence[Receipt]) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    columns = [read_meta(store, shard).column("num_tokens").to_numpy() for shard in shards]
    return np.concatenate(columns) if columns else np.zeros(0, np.int32)


def _histogram(lengths: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> Histogram:
    """Return the lengths by powers of two, without empty ends."""
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    counts = np.bincount(powers, minlength=1)
    first = int(np.argmax(counts > 0))
    return Histogram(
        bounds=[float(1 << power) for power in range(first, len(counts))], counts=[int(n) for n in counts[first:]]
    )
