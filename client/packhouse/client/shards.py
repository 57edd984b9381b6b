"""The open shards of a plan: where each sample lies, and the memory that its tokens are copied from."""

import numpy as np

from packhouse.client.errors import Damaged
from packhouse.client.format import Receipt, Shard, read_shard
from packhouse.client.plan import Int64, PlanDataset
from packhouse.client.store import ReadStore

OFFSETS, IDS, MASK, WIDTH = range(4)
"""Columns of ``OpenShards.table``."""


class ShardIndex:
    """Where each sample of a plan lies: its shard, and its row there."""

    def __init__(self, datasets: tuple[PlanDataset, ...]) -> None:
        self.receipts = tuple(shard for dataset in datasets for shard in dataset.shards)
        self.starts = np.zeros(len(self.receipts) + 1, np.int64)
        """(shards + 1,), the first sample of each shard"""
        np.cumsum([receipt.rows for receipt in self.receipts], out=self.starts[1:])

    def locate(self, samples: Int64) -> tuple[Int64, Int64]:
        """Return shard numbers and rows of ``samples``, int64 of their shape; raise ``Damaged`` for unknown ones."""
        if len(samples) and not 0 <= samples.min() <= samples.max() < self.starts[-1]:
            raise Damaged(
                f"the plan takes samples {samples.min()} to {samples.max()} of {self.starts[-1]}", "build it again"
            )
        shards = np.searchsorted(self.starts, samples, side="right") - 1
        return shards, samples - self.starts[shards]


class OpenShards:
    """The shards used last, open; one is checked against its receipt when it is first opened.

    ``table`` is int64 (shards, 4): the addresses of a shard's offsets, ids and mask bits, and the bytes of an id; all 0
    while it is closed, the mask's 0 where every token is trained. They hold until the next call of ``need``.
    """

    def __init__(self, store: ReadStore, receipts: tuple[Receipt, ...], limit: int = 1024) -> None:
        self.table = np.zeros((len(receipts), 4), np.int64)
        self.extra = False
        """Whether a shard with extra columns was ever open."""
        self._store = store
        self._receipts = receipts
        self._limit = limit
        self._open: dict[int, Shard] = {}
        self._used = np.zeros(len(receipts), np.int64)
        self._checked = np.zeros(len(receipts), np.bool_)
        self._clock = 0

    def __getitem__(self, number: int) -> Shard:
        return self._open[number]

    def __len__(self) -> int:
        return len(self._open)

    def need(self, numbers: Int64) -> None:
        """Open the shards ``numbers`` (distinct); close the ones unused longest where that makes too many.

        Raises ``NotFound`` or ``Damaged``, which name the shard.
        """
        self._clock += 1
        self._used[numbers] = self._clock
        missing = numbers[self.table[numbers, OFFSETS] == 0].tolist()
        over = len(self._open) + len(missing) - self._limit
        if missing and over > 0:
            self._close(over)
        for number in missing:
            shard = self._open[number] = self._read(number)
            self.extra |= shard.extra is not None
            mask = 0 if shard.mask_bits is None else shard.mask_bits.ctypes.data
            self.table[number] = shard.offsets.ctypes.data, shard.input_ids.ctypes.data, mask, shard.input_ids.itemsize

    def _close(self, count: int) -> None:
        idle = [number for number in self._open if self._used[number] < self._clock]
        for number in sorted(idle, key=self._used.__getitem__)[:count]:
            del self._open[number]
            self.table[number] = 0

    def _read(self, number: int) -> Shard:
        receipt, forget = self._receipts[number], getattr(self._store, "forget", None)
        try:
            shard = read_shard(self._store, receipt, checked=bool(self._checked[number]))
        except Damaged:
            # A folder of fetched shards may hold one that has been built again since, in other bytes.
            if forget is None or not forget(receipt):
                raise
            shard = read_shard(self._store, receipt)
        # What a cache fetches anew, once it was removed, are other bytes; what a store holds under a key stays.
        self._checked[number] = forget is None
        return shard
