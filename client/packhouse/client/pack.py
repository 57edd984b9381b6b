"""The canonical pack: one row of tokens with its labels, positions and segment borders, built from mapped shards.

A sample's last token has no next token to learn. A sample that the plan truncated ends where it was cut, so its last
kept token has none either, although the shard holds one; a sample that goes on in another pack, or behind a cut at
``seq_len``, does have one.
"""

from dataclasses import dataclass

import numpy as np

from packhouse.client import kernel as kernel_module
from packhouse.client.errors import Damaged
from packhouse.client.extra import Extra, extras_of
from packhouse.client.kernel import IGNORE, Flat, KernelName, Segments
from packhouse.client.plan import Int32, Int64, PackTable, PlanHeader
from packhouse.client.shards import OpenShards, ShardIndex
from packhouse.client.store import ReadStore

__all__ = ["IGNORE", "PADDING_ID", "Pack", "PackBuilder"]

PADDING_ID = 0


@dataclass(frozen=True, slots=True)
class Pack:
    """A row of P tokens."""

    input_ids: Int64
    """(P,); the padding id (0 unless told otherwise) on padding."""
    labels: Int64
    """(P,): the next token of the same sample, wherever it lies; -100 at a sample's last token, on padding and where
    the loss mask of that next token is off."""
    positions: Int64
    """(P,): from 0 in every segment, the padding tail included."""
    cu_seqlens: Int32
    """(segments + 1,): strictly rising from 0 to P; the padding tail is a segment of its own."""
    num_tokens: int
    """Tokens that are not padding; they come first."""
    max_seqlen: int
    """Tokens of the longest segment, the padding tail counted as one."""
    extras: tuple[Extra, ...] = ()
    """Of each segment, in order, the extra columns of its sample; empty where the shards have none."""


class PackBuilder:
    """Builds the packs of one plan from the shards in a store.

    ``kernel`` chooses what builds them: ``numba``, ``numpy``, or ``auto``, the faster one that is installed. The first
    packs are built by NumPy under ``auto``, so that they need not wait for the compiler.
    """

    def __init__(
        self,
        header: PlanHeader,
        store: ReadStore,
        open_shards: int = 1024,
        pad_id: int = PADDING_ID,
        kernel: KernelName = "auto",
    ) -> None:
        self.pack_length = header.spec.pack_length
        self.index = ShardIndex(header.datasets)
        self._shards = OpenShards(store, self.index.receipts, open_shards)
        # What is brought along is taken as it is: no sample of it is cut.
        cut = header.spec.overlong == "truncate" and header.spec.strategy != "preset"
        self._sample_end = header.spec.sample_limit if cut else 2**31
        self._pad_id = pad_id
        self._asked = kernel
        self._fill: kernel_module.Fill | None = None
        self.kernel = ""
        """The kernel that built the packs last."""

    def build(self, table: PackTable, first: int, last: int) -> list[Pack]:
        """Return the packs ``first:last`` of ``table``. Raises ``NotFound`` or ``Damaged`` for shards and plans."""
        length, count = self.pack_length, last - first
        segments, tokens = self._segments(table, first, last)
        self._shards.need(np.unique(segments.shard))
        borders = np.diff(segments.offsets) + 1 + (tokens < length)
        out = Flat.empty(count, length, int(borders.sum()))
        wrong = self._kernel()(segments, self._shards, length, self._sample_end, self._pad_id, out)
        if wrong >= 0:
            self._refuse(table, int(table.offsets[first]) + wrong, segments, wrong)
        ends = np.cumsum(borders).tolist()
        part = slice(int(table.offsets[first]), int(table.offsets[last]))
        extras = extras_of(table.sample[part], segments, self._shards)
        columns = zip(tokens.tolist(), out.longest.tolist(), [0, *ends], ends, extras, strict=False)
        return [
            Pack(
                out.input_ids[i * length : (i + 1) * length],
                out.labels[i * length : (i + 1) * length],
                out.positions[i * length : (i + 1) * length],
                out.cu_seqlens[begin:end],
                size,
                longest,
                extra,
            )
            for i, (size, longest, begin, end, extra) in enumerate(columns)
        ]

    def _segments(self, table: PackTable, first: int, last: int) -> tuple[Segments, Int64]:
        """Return the segments of the packs and the tokens of each pack; raise ``Damaged`` where they do not fit."""
        offsets = table.offsets[first : last + 1]
        part = slice(int(offsets[0]), int(offsets[-1]))
        shard, row = self.index.locate(table.sample[part])
        start, lengths = np.ascontiguousarray(table.start[part]), table.length[part]
        ends = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=ends[1:])
        tokens = np.diff(ends[offsets - offsets[0]])
        bad = len(lengths) and (lengths.min() < 1 or start.min() < 0)
        if bad or tokens.max(initial=0) > self.pack_length or not np.array_equal(tokens, table.tokens[first:last]):
            raise Damaged("the segments of the plan do not fit its packs", "build the plan again")
        return Segments(offsets - offsets[0], shard, row, start, lengths), tokens

    def _kernel(self) -> kernel_module.Fill:
        if self._fill is None and not self.kernel and self._asked == "auto":
            self.kernel = "numpy"
            return kernel_module.numpy_fill
        if self._fill is None:
            self.kernel, self._fill = kernel_module.load(self._asked)
        return self._fill

    def _refuse(self, table: PackTable, place: int, segments: Segments, i: int) -> None:
        shard = self._shards[int(segments.shard[i])]
        row = int(segments.row[i])
        held = int(shard.offsets[row + 1] - shard.offsets[row])
        wanted = int(segments.start[i]) + int(segments.length[i])
        raise Damaged(f"the plan takes {wanted} tokens of sample {int(table.sample[place])}, which has {held}")
