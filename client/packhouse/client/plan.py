"""The plan: an immutable Arrow file that says which segments make up each pack of each step.

``plans/{id}.arrow`` is an Arrow IPC file with one record batch; a row is a pack, steps follow one another:

=============  ==========================================================  ==========================================
column         type                                                        meaning
=============  ==========================================================  ==========================================
segments       large_list<struct<sample: int64, start, length: int32>>     sample: row number over all datasets
tokens         int32                                                       tokens of the pack that are not padding
cost           int64                                                       by the spec's cost model
=============  ==========================================================  ==========================================

The header is JSON in the schema's metadata. The id follows from the request alone; the file carries a digest of the
rest, so that an altered one is seen.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from packhouse.client.digest import canonical_json, digest_json
from packhouse.client.errors import Damaged, InvalidRequest
from packhouse.client.format import Receipt
from packhouse.client.store import ReadStore
from packhouse.client.wire import PlanReport, PlanSpec

PLAN_FORMAT = 1
ALGORITHM = 1
"""Version of what makes packs from lengths: any change of a plan's content must raise it."""

METADATA_KEY = b"packhouse"

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]

_SEGMENT = pa.struct(
    [
        pa.field(name, kind, nullable=False)
        for name, kind in [("sample", pa.int64()), ("start", pa.int32()), ("length", pa.int32())]
    ]
)
_SEGMENTS = pa.large_list(pa.field("item", _SEGMENT, nullable=False))

PLAN_SCHEMA = pa.schema(
    [
        pa.field("segments", _SEGMENTS, nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("cost", pa.int64(), nullable=False),
    ]
)

STEPS_SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("slot", pa.int32(), nullable=False),
        *PLAN_SCHEMA,
    ]
)
"""What a rank is sent: a plan's columns, the step, and the pack's place in it (-1: added to keep the ranks equal)."""


def plan_path(plan_id: str) -> str:
    """Return the store key of a plan."""
    return f"plans/{plan_id}.arrow"


def plan_id(spec: PlanSpec) -> str:
    """Return the id of the plan that ``spec`` asks for; dataset ids stand for their content."""
    return _content_id(ALGORITHM, spec.model_dump(mode="json"))


def _content_id(algorithm: int, spec: dict[str, Any]) -> str:
    return digest_json({"format": PLAN_FORMAT, "algorithm": algorithm, "spec": spec})


@dataclass(frozen=True, slots=True)
class PlanDataset:
    """A dataset as a plan knows it: enough to find and check its shards."""

    id: str
    recipe_digest: str
    vocab_size: int
    shards: tuple[Receipt, ...]


@dataclass(frozen=True, slots=True)
class PlanHeader:
    """All of a plan but its packs."""

    id: str
    spec: PlanSpec
    packs_per_step: int
    steps: int
    datasets: tuple[PlanDataset, ...]
    report: PlanReport
    algorithm: int = ALGORITHM

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "format": PLAN_FORMAT,
            "algorithm": self.algorithm,
            "id": self.id,
            "spec": self.spec.model_dump(mode="json"),
            "packs_per_step": self.packs_per_step,
            "steps": self.steps,
            "datasets": [asdict(dataset) for dataset in self.datasets],
            "report": self.report.model_dump(mode="json"),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Build from the JSON form; raise ``Damaged`` where it is not one, or not of this format."""
        try:
            if value["format"] != PLAN_FORMAT:
                raise ValueError(f"its format is {value['format']} and this client reads {PLAN_FORMAT}")
            datasets = tuple(
                PlanDataset(**{**dataset, "shards": tuple(Receipt.from_json(shard) for shard in dataset["shards"])})
                for dataset in value["datasets"]
            )
            spec = PlanSpec.model_validate(value["spec"])
            report = PlanReport.model_validate(value["report"])
            sizes = value["packs_per_step"], value["steps"]
            return cls(value["id"], spec, *sizes, datasets, report, value["algorithm"])
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(f"the header of a plan cannot be used ({error})", "build the plan again") from error


@dataclass(frozen=True, slots=True)
class PackTable:
    """Packs as flat arrays; pack ``i`` has the segments ``offsets[i]:offsets[i + 1]``."""

    offsets: Int64
    """(packs + 1,)"""
    sample: Int64
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


@dataclass(frozen=True, slots=True)
class StepTable:
    """The packs of one rank in a range of steps, equally many in each step."""

    step: Int64
    """(packs,), rising"""
    slot: Int32
    """(packs,), place in the step, or -1 for an empty pack that keeps the ranks equal"""
    packs: PackTable


class PlanSource(Protocol):
    """What a data set needs of a plan, wherever the plan lies."""

    @property
    def header(self) -> PlanHeader:
        """All of the plan but its packs."""

    def slice(self, start: int, stop: int, rank: int, world: int) -> pa.RecordBatch:
        """Return the packs of ``rank`` of ``world`` in the steps ``start:stop``, as ``STEPS_SCHEMA``."""


class PlanFile:
    """A plan in a store, memory-mapped where the store can: opening costs one check of its digest."""

    def __init__(self, store: ReadStore, header: PlanHeader, packs: PackTable) -> None:
        self.store = store
        self.header = header
        self.packs = packs

    def __reduce__(self) -> tuple[Any, ...]:
        # A map cannot be sent to another process; where it lies can.
        return PlanFile.open, (self.store, self.header.id)

    @classmethod
    def open(cls, store: ReadStore, plan_id: str) -> "PlanFile":
        """Open the plan ``plan_id``; raise ``NotFound``, or ``Damaged`` unless it is whole and that plan."""
        header, packs = load_plan(store.open(plan_path(plan_id)), plan_id)
        return cls(store, header, packs)

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

    def slice(self, start: int, stop: int, rank: int, world: int) -> pa.RecordBatch:
        """Return the packs of ``rank`` of ``world`` in the steps ``start:stop``, as ``STEPS_SCHEMA``.

        Of a step's P packs, rank r has floor(r P / world) to floor((r + 1) P / world), then empty packs up to
        ceil(P / world), so that all ranks have equally many. Takes time by what is returned, not by ``start``.
        Raises ``InvalidRequest`` for steps or ranks that are not there.
        """
        check_slice(self.header, start, stop, rank, world)
        width = self.packs_per_step
        first, last = rank * width // world, (rank + 1) * width // world
        slots = np.arange(first, first + -(-width // world), dtype=np.int64)
        steps = np.arange(start, stop, dtype=np.int64)
        rows = steps[:, None] * width + slots
        rows[:, slots >= last] = -1
        slot = np.where(slots < last, slots, -1).astype(np.int32)
        packs = self.packs.take(rows.reshape(-1))
        columns = [pa.array(np.repeat(steps, len(slots))), pa.array(np.tile(slot, len(steps))), *_columns(packs)]
        return pa.RecordBatch.from_arrays(columns, schema=STEPS_SCHEMA)


def check_slice(header: PlanHeader, start: int, stop: int, rank: int, world: int) -> None:
    """Raise ``InvalidRequest`` unless the plan has the steps and the world has the rank."""
    if not 0 <= start <= stop <= header.steps:
        raise InvalidRequest(
            f"steps {start} to {stop} are not in plan {header.id}, which has {header.steps}",
            f"ask for 0 <= start <= stop <= {header.steps}",
        )
    if not 0 <= rank < world:
        raise InvalidRequest(f"rank {rank} is not in a world of {world}", "ask for 0 <= rank < world")


def decode_steps(batch: pa.RecordBatch) -> StepTable:
    """Return the arrays of a ``STEPS_SCHEMA`` batch without a copy; raise ``Damaged`` for another schema."""
    if not batch.schema.equals(STEPS_SCHEMA):
        raise Damaged(f"the steps of a plan came as {batch.schema}", "use a client and a service of one version")
    return StepTable(batch.column("step").to_numpy(), batch.column("slot").to_numpy(), _table(batch))


def dump_plan(header: PlanHeader, packs: PackTable) -> pa.Buffer:
    """Return the plan file. Equal arguments give equal bytes."""
    body = header.to_json()
    metadata = {METADATA_KEY: canonical_json({**body, "digest": _digest(body, packs)})}
    batch = pa.RecordBatch.from_arrays(_columns(packs), schema=PLAN_SCHEMA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, PLAN_SCHEMA.with_metadata(metadata)) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def load_plan(data: pa.Buffer, plan_id: str) -> tuple[PlanHeader, PackTable]:
    """Read a plan file without a copy; raise ``Damaged`` unless it is whole and the plan ``plan_id``."""
    remedy = "build the plan again"
    try:
        reader = pa.ipc.open_file(data)
        body = json.loads(reader.schema.metadata[METADATA_KEY])
        digest = body.pop("digest")
        header = PlanHeader.from_json(body)
        if not reader.schema.equals(PLAN_SCHEMA):
            raise ValueError(f"its columns are {reader.schema.names}")
        packs = _table(reader.get_batch(0))
        # By the request as it is written: an older plan's lacks what requests have gained since.
        content = _content_id(body["algorithm"], body["spec"])
        intact = digest == _digest(body, packs) and len(packs) == header.steps * header.packs_per_step
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise Damaged(f"plan {plan_id} cannot be read ({error})", remedy) from error
    if not plan_id == header.id == content:
        raise Damaged(f"the file of plan {plan_id} holds plan {content}", remedy)
    if not intact:
        raise Damaged(f"the bytes of plan {plan_id} are not those that were written", remedy)
    return header, packs


def _columns(packs: PackTable) -> list[pa.Array]:
    fields = [pa.array(column) for column in (packs.sample, packs.start, packs.length)]
    segments = pa.StructArray.from_arrays(fields, fields=list(_SEGMENT))
    lists = pa.LargeListArray.from_arrays(pa.array(packs.offsets), segments, type=_SEGMENTS)
    return [lists, pa.array(packs.tokens), pa.array(packs.cost)]


def _table(batch: pa.RecordBatch) -> PackTable:
    lists = batch.column("segments")
    columns = [lists.offsets, *lists.values.flatten(), batch.column("tokens"), batch.column("cost")]
    return PackTable(*(column.to_numpy() for column in columns))


def _digest(body: dict[str, Any], packs: PackTable) -> str:
    state = xxhash.xxh3_128(canonical_json(body))
    for array in packs.arrays():
        state.update(array.data)
    return state.hexdigest()
