"""The plan: an immutable artefact that says which segments make up each pack of each step.

``plans/{id}.arrow`` is an Arrow IPC file with one record batch; a row is a step:

==============  ====================  ================================================================================
column          type                  meaning
==============  ====================  ================================================================================
tokens          int64                 tokens of the step that are not padding
trained_tokens  int64, or null        labels of the step; null where a sample that is trained in part is cut
rank_cost       list<int64>[ranks]    cost of each rank, by the spec's cost model
==============  ====================  ================================================================================

The header is JSON in the schema's metadata. The packs lie in **parts**, ``packs/{id}/{number}.arrow``, of equally many
steps, so that any step is found at once and no writer or reader needs all of them; a row is a pack:

========  ======================================================  ====================================================
column    type                                                    meaning
========  ======================================================  ====================================================
segments  large_list<struct<sample: int32 or int64, start,        sample: row number over all datasets; start, in
          length: int32>>                                         tokens, is left out where it is 0 in all of the part
tokens    int32                                                   tokens of the pack that are not padding
cost      int64                                                   by the spec's cost model
========  ======================================================  ====================================================

The id follows from the request alone; the header carries a digest of the steps and of each part, so that an altered
one is seen. The header is written last: a plan exists when its header does.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import xxhash

from packhouse.client.digest import canonical_json, digest_bytes
from packhouse.client.errors import Damaged, InvalidRequest, NotFound
from packhouse.client.pack_table import (
    STEPS_SCHEMA,
    Ids,
    Int32,
    Int64,
    PackTable,
    StepTable,
    decode_part,
    decode_steps,
    encode_steps,
    joined,
)
from packhouse.client.plan_header import (
    ALGORITHM,
    PLAN_FORMAT,
    PlanDataset,
    PlanHeader,
    content_id,
    part_path,
    plan_id,
    plan_path,
)
from packhouse.client.store import ReadStore
from packhouse.client.wire_plans import PlanReport, PlanSpec

__all__ = [
    "ALGORITHM",
    "METADATA_KEY",
    "PLAN_FORMAT",
    "STEPS_SCHEMA",
    "Ids",
    "Int32",
    "Int64",
    "PackTable",
    "PlanDataset",
    "PlanFile",
    "PlanHeader",
    "PlanSource",
    "StepTable",
    "Steps",
    "check_slice",
    "decode_steps",
    "dump_header",
    "part_path",
    "plan_id",
    "plan_path",
]

METADATA_KEY = b"packhouse"

OPEN_PARTS = 16
"""Parts that a reader keeps open: maps where the store has files, memory where it has not."""


@dataclass(frozen=True, slots=True)
class Steps:
    """What a plan knows of its steps without their packs."""

    tokens: Int64
    """(steps,)"""
    trained_tokens: Int64
    """(steps,), labels, or -1 where they are not known"""
    rank_cost: Int64
    """(steps, ranks)"""


class PlanSource(Protocol):
    """What a data set needs of a plan, wherever the plan lies."""

    @property
    def header(self) -> PlanHeader:
        """All of the plan but its packs."""

    def slice(self, start: int, stop: int, rank: int, world: int) -> pa.RecordBatch:
        """Return the packs of ``rank`` of ``world`` in the steps ``start:stop``, as ``STEPS_SCHEMA``."""


class PlanFile:
    """A plan in a store, memory-mapped where the store can. Parts are checked when they are first read."""

    def __init__(self, store: ReadStore, header: PlanHeader, table: Steps) -> None:
        self.store = store
        self.header = header
        self.table = table
        self._part = lru_cache(OPEN_PARTS)(self._open_part)

    def __reduce__(self) -> tuple[Any, ...]:
        # A map cannot be sent to another process; where it lies can.
        return PlanFile.open, (self.store, self.header.id)

    @classmethod
    def open(cls, store: ReadStore, plan_id: str) -> "PlanFile":
        """Open the plan ``plan_id``; raise ``NotFound``, or ``Damaged`` unless its header is whole and of that plan."""
        return cls(store, *_load_header(store.open(plan_path(plan_id)), plan_id))

    @property
    def id(self) -> str:
        """The plan's id."""
        return self.header.id

    @property
    def spec(self) -> PlanSpec:
        """What the plan was asked for."""
        return self.header.spec

    @property
    def report(self) -> PlanReport:
        """How good the plan is."""
        return self.header.report

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.header.steps

    @property
    def packs_per_step(self) -> int:
        """Packs of a step, over all ranks."""
        return self.header.packs_per_step

    @property
    def packs(self) -> PackTable:
        """All packs of the plan, in memory; raise ``Damaged`` for a part that is not whole."""
        return joined([self._part(number) for number in range(len(self.header.parts))])

    def check(self) -> None:
        """Read all parts once; raise ``Damaged`` unless all are whole."""
        for number in range(len(self.header.parts)):
            self._open_part(number)

    def slice(self, start: int, stop: int, rank: int, world: int) -> pa.RecordBatch:
        """Return the packs of ``rank`` of ``world`` in the steps ``start:stop``, as ``STEPS_SCHEMA``.

        Of a step's P packs, rank r has floor(r P / world) to floor((r + 1) P / world), then empty packs up to
        ceil(P / world), so that all ranks have equally many. Takes time by what is returned, not by ``start``.
        Raises ``InvalidRequest`` for steps or ranks that are not there, ``Damaged`` for a part that is not whole.
        """
        check_slice(self.header, start, stop, rank, world)
        width = self.packs_per_step
        first, last = rank * width // world, (rank + 1) * width // world
        slots = np.arange(first, first + -(-width // world), dtype=np.int64)
        slot = np.where(slots < last, slots, -1).astype(np.int32)
        height = self.header.steps_per_part
        tables = []
        for number in range(start // height, -(-stop // height) if stop > start else 0):
            begin = number * height
            rows = np.arange(max(start, begin) - begin, min(stop, begin + height) - begin)[:, None] * width + slots
            rows[:, slots >= last] = -1
            tables.append(self._part(number).take(rows.reshape(-1)))
        steps = np.repeat(np.arange(start, stop, dtype=np.int64), len(slots))
        counts = self.table.tokens[steps], self.table.trained_tokens[steps]
        return encode_steps(StepTable(steps, np.tile(slot, stop - start), joined(tables), *counts))

    def _open_part(self, number: int) -> PackTable:
        part, remedy = self.header.parts[number], "build the plan again"
        try:
            data = self.store.open(part_path(self.id, number))
        except NotFound:
            raise Damaged(f"part {number} of plan {self.id} is gone", remedy) from None
        if data.size != part.bytes or digest_bytes(data) != part.digest:
            raise Damaged(f"the bytes of part {number} of plan {self.id} are not those that were written", remedy)
        return decode_part(pa.ipc.open_file(data).get_batch(0))


def check_slice(header: PlanHeader, start: int, stop: int, rank: int, world: int) -> None:
    """Raise ``InvalidRequest`` unless the plan has the steps and the world has the rank."""
    if not 0 <= start <= stop <= header.steps:
        raise InvalidRequest(
            f"steps {start} to {stop} are not in plan {header.id}, which has {header.steps}",
            f"ask for 0 <= start <= stop <= {header.steps}",
        )
    if not 0 <= rank < world:
        raise InvalidRequest(f"rank {rank} is not in a world of {world}", "ask for 0 <= rank < world")


def dump_header(header: PlanHeader, table: Steps) -> pa.Buffer:
    """Return the file of the header and the steps. Equal arguments give equal bytes."""
    body = header.to_json()
    metadata = {METADATA_KEY: canonical_json({**body, "digest": _digest(body, table)})}
    schema = _steps_schema(header.spec.ranks)
    trained = pa.array(table.trained_tokens, mask=table.trained_tokens < 0)
    cost = pa.FixedSizeListArray.from_arrays(pa.array(table.rank_cost.reshape(-1)), type=schema.field("rank_cost").type)
    batch = pa.RecordBatch.from_arrays([pa.array(table.tokens), trained, cost], schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema.with_metadata(metadata)) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _steps_schema(ranks: int) -> pa.Schema:
    costs = pa.list_(pa.field("item", pa.int64(), nullable=False), ranks)
    return pa.schema(
        [
            pa.field("tokens", pa.int64(), nullable=False),
            pa.field("trained_tokens", pa.int64()),
            pa.field("rank_cost", costs, nullable=False),
        ]
    )


def _load_header(data: pa.Buffer, plan_id: str) -> tuple[PlanHeader, Steps]:
    remedy = "build the plan again"
    try:
        reader = pa.ipc.open_file(data)
        body = json.loads(reader.schema.metadata[METADATA_KEY])
        digest = body.pop("digest")
        header = PlanHeader.from_json(body)
        if not reader.schema.equals(_steps_schema(header.spec.ranks)):
            raise ValueError(f"its columns are {reader.schema.names}")
        table = _steps(reader.get_batch(0), header)
        # By the request as it is written: an older plan's lacks what requests have gained since.
        content = content_id(body["algorithm"], body["spec"])
        intact = digest == _digest(body, table) and len(table.tokens) == header.steps
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise Damaged(f"plan {plan_id} cannot be read ({error})", remedy) from error
    if not plan_id == header.id == content:
        raise Damaged(f"the file of plan {plan_id} holds plan {content}", remedy)
    if not intact:
        raise Damaged(f"the bytes of plan {plan_id} are not those that were written", remedy)
    return header, table


def _steps(batch: pa.RecordBatch, header: PlanHeader) -> Steps:
    trained = batch.column("trained_tokens").fill_null(-1).to_numpy()
    cost = batch.column("rank_cost").flatten().to_numpy().reshape(-1, header.spec.ranks)
    return Steps(batch.column("tokens").to_numpy(), trained, cost)


def _digest(body: dict[str, Any], table: Steps) -> str:
    state = xxhash.xxh3_128(canonical_json(body))
    for array in (table.tokens, table.trained_tokens, table.rank_cost):
        state.update(np.ascontiguousarray(array).data)
    return state.hexdigest()
