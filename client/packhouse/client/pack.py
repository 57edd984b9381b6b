"""The canonical pack: one row of tokens with its labels, positions and segment borders, built from mapped shards.

A sample's last token has no next token to learn. A sample that the plan truncated ends where it was cut, so its last
kept token has none either, although the shard holds one; a sample that goes on in another pack, or behind a cut at
``seq_len``, does have one.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packhouse.client.errors import Damaged
from packhouse.client.format import Receipt, Shard, read_shard
from packhouse.client.plan import Int32, Int64, PackTable, PlanDataset, PlanHeader
from packhouse.client.store import ReadStore

PADDING_ID = 0
IGNORE = -100
"""Label of a token that is not trained."""


@dataclass(frozen=True, slots=True)
class Pack:
    """A row of P tokens."""

    input_ids: Int64
    """(P,); 0 on padding."""
    labels: Int64
    """(P,): the next token of the same sample, wherever it lies; -100 at a sample's last token, on padding and where
    the loss mask of that next token is off."""
    positions: Int64
    """(P,): from 0 in every segment, the padding tail included."""
    cu_seqlens: Int32
    """(segments + 1,): strictly rising from 0 to P; the padding tail is a segment of its own."""
    num_tokens: int
    """Tokens that are not padding."""


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


class ShardCache:
    """The shards used last, open. A shard is checked against its receipt when it is opened."""

    def __init__(self, store: ReadStore, receipts: tuple[Receipt, ...], limit: int = 1024) -> None:
        self._store = store
        self._receipts = receipts
        self._limit = limit
        self._open: OrderedDict[int, Shard] = OrderedDict()

    def __getitem__(self, number: int) -> Shard:
        shard = self._open.get(number)
        if shard is None:
            shard = self._open[number] = read_shard(self._store, self._receipts[number])
            if len(self._open) > self._limit:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(number)
        return shard


class PackBuilder:
    """Builds the packs of one plan from the shards in a store."""

    def __init__(self, header: PlanHeader, store: ReadStore, open_shards: int = 1024) -> None:
        self.pack_length = header.spec.pack_length
        self._index = ShardIndex(header.datasets)
        self._shards = ShardCache(store, self._index.receipts, open_shards)
        self._sample_end = self.pack_length if header.spec.overlong == "truncate" else 2**31

    def build(self, table: PackTable, first: int, last: int) -> list[Pack]:
        """Return the packs ``first:last`` of ``table``. Raises ``NotFound`` or ``Damaged`` for shards and plans.

        One pass over all of them: a slice copy per segment, and whole-array work for labels and positions.
        """
        length, count = self.pack_length, last - first
        starts, pads = _borders(table, first, last, length)
        input_ids, labels = self._tokens(table, first, last, starts)
        # Segments and padding tails cover the packs without a gap, so the next border is where each ends.
        borders = np.concatenate([starts, pads, [count * length]])
        borders.sort()
        positions = np.arange(count * length)
        positions -= np.repeat(borders[:-1], borders[1:] - borders[:-1])
        cuts = np.searchsorted(borders, np.arange(count + 1) * length)
        packs = []
        for i in range(count):
            row = slice(i * length, (i + 1) * length)
            tokens = int(table.tokens[first + i])
            labels[row.start + tokens : row.stop] = IGNORE
            ends = (borders[cuts[i] : cuts[i + 1] + 1] - row.start).astype(np.int32)
            packs.append(Pack(input_ids[row], labels[row], positions[row], ends, tokens))
        return packs

    def _tokens(self, table: PackTable, first: int, last: int, starts: Int64) -> tuple[Int64, Int64]:
        """Return ids and labels of all packs end to end; labels on padding are left open."""
        segments = slice(int(table.offsets[first]), int(table.offsets[last]))
        size = (last - first) * self.pack_length
        input_ids = np.full(size, PADDING_ID, np.int64)
        trained: npt.NDArray[np.bool_] | None = None
        following = np.full(len(starts), IGNORE, np.int64)
        shards, rows = self._index.locate(table.sample[segments])
        columns = shards, rows, table.start[segments], table.length[segments], starts
        for i, (number, row, start, length, at) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            shard = self._shards[number]
            base, end = int(shard.offsets[row]), int(shard.offsets[row + 1])
            left, right = base + start, base + start + length
            if right > end:
                sample = int(table.sample[segments.start + i])
                raise Damaged(f"the plan takes {start + length} tokens of sample {sample}, which has {end - base}")
            input_ids[at : at + length] = shard.input_ids[left:right]
            if shard.mask_bits is not None:
                if trained is None:
                    trained = np.ones(size, np.bool_)
                trained[at : at + length] = shard.mask(left, right)
            if right < min(end, base + self._sample_end) and shard.mask(right, right + 1)[0]:
                following[i] = shard.input_ids[right]
        labels = np.empty_like(input_ids)
        labels[:-1] = input_ids[1:]
        if trained is not None:
            np.putmask(labels[:-1], ~trained[1:], IGNORE)
        labels[starts + table.length[segments] - 1] = following
        return input_ids, labels


def _borders(table: PackTable, first: int, last: int, length: int) -> tuple[Int64, Int64]:
    """Return where segments and where padding tails start when the packs lie end to end, int64."""
    offsets = table.offsets[first : last + 1]
    ends = np.zeros(offsets[-1] - offsets[0] + 1, np.int64)
    np.cumsum(table.length[offsets[0] : offsets[-1]], out=ends[1:])
    packs = np.arange(last - first) * length
    shift = packs - ends[offsets[:-1] - offsets[0]]
    starts = ends[:-1] + np.repeat(shift, np.diff(offsets))
    tokens = table.tokens[first:last]
    return starts, (packs + tokens)[tokens < length]
