"""Extra columns: what a tokenize function keeps of a sample beside its ids and labels, with stated types."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from packhouse.client.errors import InvalidRequest

if TYPE_CHECKING:
    from packhouse.client.kernel import Segments
    from packhouse.client.pack import Pack
    from packhouse.client.plan import Int64
    from packhouse.client.shards import OpenShards

_LIST = re.compile(r"list<(.+)>")
_PLAIN = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float32", "float64", "string", "binary"),
)

_TAKEN = ("input_ids", "labels", "num_tokens", "shifted_labels")
"""What a segment of a batch has besides."""


@dataclass(frozen=True, slots=True)
class Extra:
    """The extra columns of the sample that a segment is of, and which part of the sample that is."""

    sample: int
    """Row number over all datasets of the plan."""
    start: int
    """Tokens of the sample before the segment."""
    length: int
    """Tokens of the segment."""
    values: Mapping[str, Any]
    """By column; None where the function returned nothing."""


Runtime = Callable[[Extra], Mapping[str, Any]]
"""What makes of a sample's extra columns what a batch needs, in the process that builds the batch."""


def data_type(name: str) -> pa.DataType:
    """Return the Arrow type of a name such as ``int64``, ``string`` or ``list<float32>``; raise ``InvalidRequest``."""
    if found := _LIST.fullmatch(name):
        return pa.list_(data_type(found[1]))
    if name not in _PLAIN:
        raise InvalidRequest(f"{name!r} is not a type of an extra column", f"use {', '.join(_PLAIN)} or list<…>")
    return pa.type_for_alias(name)


def struct_type(columns: Iterable[tuple[str, str]]) -> pa.StructType:
    """Return the type of the shard's column for extra columns of these names and types; raise ``InvalidRequest``."""
    columns = list(columns)
    for name, _ in columns:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", name) or name in _TAKEN:
            raise InvalidRequest(f"{name!r} cannot name an extra column", "use up to 64 letters, digits and '_'")
    return pa.struct([pa.field(name, data_type(kind)) for name, kind in columns])


def extras_of(samples: "Int64", segments: "Segments", shards: "OpenShards") -> list[tuple[Extra, ...]]:
    """Return the extra columns of each pack's segments, in order; empty tuples where no shard in use has any."""
    counts = np.diff(segments.offsets).tolist()
    if not shards.extra:
        return [()] * len(counts)
    columns = (samples, segments.shard, segments.row, segments.start, segments.length)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    found = (Extra(sample, start, length, shards[number].extra_of(row)) for sample, number, row, start, length in rows)
    return [tuple(islice(found, count)) for count in counts]


def prepared(pack: "Pack", runtime: Runtime) -> "Pack":
    """Return the pack with what ``runtime`` makes of each of its segments put beside their columns."""
    made = (replace(one, values={**one.values, **runtime(one)}) for one in pack.extras)
    return replace(pack, extras=tuple(made))


def as_data(packs: "Sequence[Pack]") -> dict[str, list[list[dict[str, Any]]]]:
    """Return ``{"extra": …}``, a dictionary for each segment of each pack, or nothing where there are none."""
    if not any(pack.extras for pack in packs):
        return {}
    return {"extra": [[dict(one.values) for one in pack.extras] for pack in packs]}
