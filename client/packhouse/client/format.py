"""Shards and manifests: their schemas, keys and checked readers.

A **shard** is one Arrow IPC file with one record batch; a row is a sample:

=================  ==============================  ==========================================================
column             type                            meaning
=================  ==============================  ==========================================================
input_ids          large_list<uint16 or uint32>    token ids; the narrowest type that holds the whole vocabulary
loss_mask          large_list<bool>                true where the token is trained; absent when all tokens are
num_tokens         int32                           tokens of the sample, n
attention_cost     int64                           n (n + 1) / 2, the lower triangle of its attention
trained_tokens     int32                           tokens whose mask is true
labels             int32                           the same without the first token, which nothing predicts
row                int32                           line of the record in its block, from 0
offset             int64                           tokens of the record before this sample; only where a job splits
                                                   long records, whose samples have the same row
extra              struct                          what a tokenize function keeps beside ids and labels; only where it
                                                   states such columns, each of which may be null
=================  ==============================  ==========================================================

Beside it lies a **meta** file with the columns from num_tokens to row, so that planning never reads a token, and a
**receipt**, a small JSON file written last: a shard exists when its receipt does.
"""

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import pyarrow as pa

from packhouse.client.digest import digest_bytes, digest_json, sealed, unsealed
from packhouse.client.errors import Damaged
from packhouse.client.store import ReadStore

FORMAT_VERSION = 2

EXTRA = "extra"
"""The column of a shard's extra columns, see ``packhouse.client.extra``."""

META_SCHEMA = pa.schema(
    [
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("attention_cost", pa.int64(), nullable=False),
        pa.field("trained_tokens", pa.int32(), nullable=False),
        pa.field("labels", pa.int32(), nullable=False),
        pa.field("row", pa.int32(), nullable=False),
    ]
)


def shard_schema(
    vocab_size: int, *, masked: bool, split: bool = False, extra: pa.StructType | None = None
) -> pa.Schema:
    """Return the schema of a shard whose ids are below ``vocab_size`` (added tokens included)."""
    ids = pa.uint16() if vocab_size <= 1 << 16 else pa.uint32()
    lists = [_list_field("input_ids", ids)]
    if masked:
        lists.append(_list_field("loss_mask", pa.bool_()))
    places = [pa.field("offset", pa.int64(), nullable=False)] if split else []
    columns = [] if extra is None else [pa.field(EXTRA, extra, nullable=False)]
    return pa.schema([*lists, *META_SCHEMA, *places, *columns])


def _list_field(name: str, item: pa.DataType) -> pa.Field:
    return pa.field(name, pa.large_list(pa.field("item", item, nullable=False)), nullable=False)


def data_path(key: str) -> str:
    """Return the store key of a shard's tokens."""
    return f"shards/{key[:2]}/{key}.arrow"


def meta_path(key: str) -> str:
    """Return the store key of a shard's per-sample numbers."""
    return f"shards/{key[:2]}/{key}.meta.arrow"


def rejected_path(key: str) -> str:
    """Return the store key of a shard's quarantine sidecar: JSON lines, absent when nothing was rejected."""
    return f"shards/{key[:2]}/{key}.rejected.jsonl"


def receipt_path(key: str) -> str:
    """Return the store key of a shard's receipt."""
    return f"shards/{key[:2]}/{key}.json"


def manifest_path(dataset_id: str) -> str:
    """Return the store key of a dataset's manifest."""
    return f"datasets/{dataset_id}.json"


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Length in bytes and xxh3-128 of a stored file."""

    bytes: int
    digest: str

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"bytes": self.bytes, "digest": self.digest}


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a committed shard holds, in sums over its samples, and how to check its files."""

    key: str
    rows: int
    tokens: int
    trained_tokens: int
    attention_cost: int
    records: int
    """Lines of the block that are not blank: rows - fragments + split + dropped + rejected."""
    data: FileInfo
    meta: FileInfo
    rejected: dict[str, int] = field(default_factory=dict)
    """Records kept out, by reason; each stands in the sidecar."""
    dropped: int = 0
    """Samples longer than max_length under overflow=drop, and with nothing to train under untrained=drop; left out."""
    truncated: int = 0
    """Samples cut at max_length under overflow=truncate."""
    truncated_tokens: int = 0
    """Tokens lost by the cuts and drops."""
    split: int = 0
    """Records that became several samples under overflow=split."""
    fragments: int = 0
    """Samples that those became."""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Build from the JSON form."""
        return cls(**{**value, "data": FileInfo(**value["data"]), "meta": FileInfo(**value["meta"])})

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        # Not by asdict, which copies deep and slowly: a manifest may have a million of these.
        value = {name: getattr(self, name) for name in self.__slots__}
        return value | {"data": self.data.to_json(), "meta": self.meta.to_json(), "rejected": dict(self.rejected)}


@dataclass(frozen=True, slots=True)
class Manifest:
    """A dataset: an ordered list of shards under one recipe.

    The id depends on the recipe and on the shard keys in order, so on content alone: not on paths, worker count
    or the library versions that wrote the files.
    """

    recipe: dict[str, Any]
    vocab_size: int
    shards: tuple[Receipt, ...]

    @property
    def recipe_digest(self) -> str:
        """xxh3-128 of the recipe."""
        return digest_json(self.recipe)

    @property
    def id(self) -> str:
        """The dataset's content address."""
        keys = [shard.key for shard in self.shards]
        return digest_json({"format": FORMAT_VERSION, "recipe": self.recipe_digest, "shards": keys})

    @property
    def rows(self) -> int:
        """Number of samples."""
        return sum(shard.rows for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(shard.tokens for shard in self.shards)

    def dump(self) -> bytes:
        """Return the manifest file."""
        body = {
            "format": FORMAT_VERSION,
            "id": self.id,
            "recipe": self.recipe,
            "vocab_size": self.vocab_size,
            "shards": [shard.to_json() for shard in self.shards],
        }
        return sealed(body)

    @classmethod
    def load(cls, data: bytes | pa.Buffer, dataset_id: str) -> Self:
        """Read a manifest file; raise ``Damaged`` unless it is the one of ``dataset_id``."""
        try:
            body = unsealed(bytes(data))
            if unknown := set(body) - {"format", "id", "recipe", "vocab_size", "shards"}:
                raise ValueError(f"unknown {min(unknown)!r}")
            shards = tuple(Receipt.from_json(shard) for shard in body["shards"])
            manifest = cls(body["recipe"], body["vocab_size"], shards)
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(
                f"the manifest of dataset {dataset_id} cannot be read ({error})", "run the job again"
            ) from error
        if manifest.id != dataset_id:
            raise Damaged(f"the manifest of dataset {dataset_id} describes {manifest.id}", "run the job again")
        return manifest


def read_manifest(store: ReadStore, dataset_id: str) -> Manifest:
    """Return the manifest of a dataset in ``store``."""
    return Manifest.load(store.open(manifest_path(dataset_id)), dataset_id)


@dataclass(frozen=True, slots=True)
class Shard:
    """The tokens of a shard as flat arrays over its mapped file; sample ``i`` is ``offsets[i]:offsets[i + 1]``."""

    offsets: np.ndarray[tuple[int], np.dtype[np.int64]]
    """int64, rows + 1."""
    input_ids: np.ndarray[tuple[int], np.dtype[np.unsignedinteger[Any]]]
    """uint16 or uint32, tokens."""
    mask_bits: np.ndarray[tuple[int], np.dtype[np.uint8]] | None
    """uint8, one bit per token, least significant first; None when all tokens are trained."""
    extra: pa.StructArray | None = None
    """Extra columns, a row a sample; None where the shard has none."""

    def extra_of(self, row: int) -> dict[str, Any]:
        """Return the extra columns of a sample; raise ``IndexError`` for one that is not there."""
        return {} if self.extra is None else dict(self.extra[row].as_py())

    def mask(self, start: int, stop: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return the loss mask of the tokens ``start:stop`` of the shard, bool."""
        if self.mask_bits is None:
            return np.ones(stop - start, np.bool_)
        first = start >> 3
        bits = np.unpackbits(self.mask_bits[first : (stop + 7) >> 3], bitorder="little")
        return bits[start - (first << 3) : stop - (first << 3)].view(np.bool_)


def read_shard(store: ReadStore, receipt: Receipt, *, checked: bool = False) -> Shard:
    """Open a shard's tokens, checked against its receipt; raise ``Damaged`` or ``NotFound``.

    ``checked`` says that this process has found its bytes right before, and need not read them all again.
    """
    batch = _read_batch(store, data_path(receipt.key), receipt.data, receipt, checked=checked)
    ids = batch.column("input_ids")
    offsets = np.frombuffer(ids.buffers()[1], np.int64, receipt.rows + 1) if receipt.rows else np.zeros(1, np.int64)
    values = np.asarray(ids.values)[: receipt.tokens]
    bits = None
    if "loss_mask" in batch.schema.names:
        buffer = batch.column("loss_mask").values.buffers()[1]
        bits = np.frombuffer(buffer, np.uint8) if buffer is not None else np.zeros(0, np.uint8)
    extra = batch.column(EXTRA) if EXTRA in batch.schema.names else None
    return Shard(offsets, values, bits, extra)


def read_meta(store: ReadStore, receipt: Receipt) -> pa.RecordBatch:
    """Open a shard's per-sample numbers (``META_SCHEMA``), checked against its receipt."""
    return _read_batch(store, meta_path(receipt.key), receipt.meta, receipt)


def _read_batch(
    store: ReadStore, key: str, info: FileInfo, receipt: Receipt, *, checked: bool = False
) -> pa.RecordBatch:
    remedy = "run 'packhouse cache verify', which moves it aside, and then the job again, which rebuilds the shard"
    buffer = store.open(key)
    if buffer.size != info.bytes:
        raise Damaged(f"{key} has {buffer.size} bytes and its manifest says {info.bytes}", remedy)
    if not checked and digest_bytes(buffer) != info.digest:
        raise Damaged(f"the bytes of {key} are not those its manifest states", remedy)
    try:
        batch = pa.ipc.open_file(buffer).get_batch(0)
    except pa.ArrowInvalid as error:
        raise Damaged(f"{key} is not an Arrow file ({error})", remedy) from None
    if batch.num_rows != receipt.rows:
        raise Damaged(f"{key} has {batch.num_rows} rows and its manifest says {receipt.rows}", remedy)
    return batch
