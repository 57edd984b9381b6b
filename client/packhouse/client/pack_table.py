"""Packs as flat arrays, and the two Arrow forms they take: a part of a stored plan, and the steps sent to a rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packhouse.client.errors import Damaged

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Ids = npt.NDArray[Any]
"""Numbers of samples: int32 where that holds them, to halve what a plan takes, else int64."""


def _list_of(kinds: dict[str, pa.DataType]) -> pa.DataType:
    fields = [pa.field(name, kind, nullable=False) for name, kind in kinds.items()]
    return pa.large_list(pa.field("item", pa.struct(fields), nullable=False))


def _pack_fields(segments: pa.DataType) -> list[pa.Field]:
    kinds = {"segments": segments, "tokens": pa.int32(), "cost": pa.int64()}
    return [pa.field(name, kind, nullable=False) for name, kind in kinds.items()]


_SEGMENTS = _list_of({"sample": pa.int64(), "start": pa.int32(), "length": pa.int32()})

STEPS_SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("slot", pa.int32(), nullable=False),
        *_pack_fields(_SEGMENTS),
        pa.field("step_tokens", pa.int64(), nullable=False),
        pa.field("step_trained_tokens", pa.int64()),
    ]
)
"""What a rank is sent: packs, the step of each, its place in the step (-1: added to keep the ranks equal), and the
step's tokens and labels over all ranks, whatever the world; the labels are null where the plan does not know them."""


@dataclass(frozen=True, slots=True)
class PackTable:
    """Packs as flat arrays; pack ``i`` has the segments ``offsets[i]:offsets[i + 1]``."""

    offsets: Int64
    """(packs + 1,)"""
    sample: Ids
    """(segments,)"""
    start: Int32
    """(segments,), tokens from the start of the sample"""
    length: Int32
    """(segments,), tokens"""
    tokens: Int32
    """(packs,)"""
    cost: Int64
    """(packs,)"""

    def __len__(self) -> int:
        return len(self.tokens)

    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """Return the six arrays in the order of the fields."""
        return self.offsets, self.sample, self.start, self.length, self.tokens, self.cost

    def take(self, rows: Int64) -> "PackTable":
        """Return the packs ``rows``; -1 stands for an empty pack. Source: ranges by repeat and cumulative sum."""
        real = rows >= 0
        first = np.where(real, self.offsets[rows], 0)
        sizes = np.where(real, self.offsets[rows + 1] - first, 0)
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        segments = np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], sizes)
        return PackTable(
            offsets,
            self.sample[segments],
            self.start[segments],
            self.length[segments],
            np.where(real, self.tokens[rows], np.int32(0)),
            np.where(real, self.cost[rows], 0),
        )


def joined(tables: Sequence[PackTable]) -> PackTable:
    """Return the packs of all ``tables``, one table after the other; sample is int64."""
    shifts = np.cumsum([0, *(len(table.sample) for table in tables)])
    offsets = [table.offsets[1:] - table.offsets[0] + shift for table, shift in zip(tables, shifts, strict=False)]
    kinds: list[Any] = [np.int64, np.int64, np.int32, np.int32, np.int32, np.int64]
    empty = PackTable(*(np.zeros(0, kind) for kind in kinds))
    columns: Any = zip(*(table.arrays()[1:] for table in [empty, *tables]), strict=True)
    return PackTable(np.concatenate([np.zeros(1, np.int64), *offsets]), *map(np.concatenate, columns))


@dataclass(frozen=True, slots=True)
class StepTable:
    """The packs of one rank in a range of steps, equally many in each step."""

    step: Int64
    """(packs,), rising"""
    slot: Int32
    """(packs,), place in the step, or -1 for an empty pack that keeps the ranks equal"""
    packs: PackTable
    step_tokens: Int64
    """(packs,), tokens of the pack's step over all ranks"""
    step_trained_tokens: Int64
    """(packs,), labels of the pack's step over all ranks, or -1 where the plan does not know them"""


def encode_steps(table: StepTable) -> pa.RecordBatch:
    """Return the table as ``STEPS_SCHEMA``."""
    trained = pa.array(table.step_trained_tokens, mask=table.step_trained_tokens < 0)
    packs = _columns(table.packs, _SEGMENTS)
    columns = [pa.array(table.step), pa.array(table.slot), *packs, pa.array(table.step_tokens), trained]
    return pa.RecordBatch.from_arrays(columns, schema=STEPS_SCHEMA)


def decode_steps(batch: pa.RecordBatch) -> StepTable:
    """Return the arrays of a ``STEPS_SCHEMA`` batch; raise ``Damaged`` for another schema. Packs are not copied."""
    if not batch.schema.equals(STEPS_SCHEMA):
        raise Damaged(f"the steps of a plan came as {batch.schema}", "use a client and a service of one version")
    trained = batch.column("step_trained_tokens").fill_null(-1).to_numpy()
    columns = [batch.column(name).to_numpy() for name in ("step", "slot", "step_tokens")]
    return StepTable(columns[0], columns[1], _table(batch), columns[2], trained)


def encode_part(table: PackTable) -> pa.RecordBatch:
    """Return the packs as a stored plan holds them: without starts where all are 0, sample as narrow as it is."""
    kinds = {"sample": pa.from_numpy_dtype(table.sample.dtype), "start": pa.int32(), "length": pa.int32()}
    if not table.start.any():
        del kinds["start"]
    segments = _list_of(kinds)
    return pa.RecordBatch.from_arrays(_columns(table, segments), schema=pa.schema(_pack_fields(segments)))


def decode_part(batch: pa.RecordBatch) -> PackTable:
    """Return the arrays of a part without a copy; raise ``ValueError`` for what is not one."""
    lists = batch.column("segments").type
    names = [field.name for field in lists.value_type]
    known = names in (["sample", "length"], ["sample", "start", "length"])
    if not known or not batch.schema.equals(pa.schema(_pack_fields(lists))):
        raise ValueError(f"its columns are {batch.schema}")
    return _table(batch)


def _columns(packs: PackTable, segments: pa.DataType) -> list[pa.Array]:
    kind = segments.value_type
    fields = [pa.array(getattr(packs, field.name), field.type) for field in kind]
    values = pa.StructArray.from_arrays(fields, fields=list(kind))
    lists = pa.LargeListArray.from_arrays(pa.array(packs.offsets), values, type=segments)
    return [lists, pa.array(packs.tokens), pa.array(packs.cost)]


def _table(batch: pa.RecordBatch) -> PackTable:
    lists = batch.column("segments")
    names = [field.name for field in lists.type.value_type]
    fields = dict(zip(names, (column.to_numpy() for column in lists.values.flatten()), strict=True))
    # Starts that are not stored are 0; one zero stands for all of them.
    start = fields.get("start", np.broadcast_to(np.int32(0), len(fields["length"])))
    tokens, cost = batch.column("tokens").to_numpy(), batch.column("cost").to_numpy()
    return PackTable(lists.offsets.to_numpy(), fields["sample"], start, fields["length"], tokens, cost)
