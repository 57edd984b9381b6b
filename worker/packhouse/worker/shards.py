"""Shards on disk: from a block's samples to three files and a receipt, written in the order that makes it safe."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from packhouse.client.digest import digest_bytes
from packhouse.client.errors import Damaged, NotFound, Unavailable
from packhouse.client.format import (
    META_SCHEMA,
    FileInfo,
    Receipt,
    data_path,
    meta_path,
    receipt_path,
    rejected_path,
    shard_schema,
)
from packhouse.client.receipt_file import ReceiptFile, read_receipt
from packhouse.client.store import ReadStore, Store
from packhouse.worker.tokenize import Samples


def write_shard(
    store: Store, key: str, samples: Samples, vocab_size: int, *, made_by: dict[str, Any] | None = None
) -> Receipt:
    """Write a shard's files, its receipt last, and return the receipt; ``made_by`` is noted in the receipt's file.

    The same samples give the same bytes, so two workers that build one shard do no harm.
    """
    counts = np.diff(samples.offsets)
    trained, first = counts, counts > 0
    if samples.mask is not None:
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(samples.mask, dtype=np.int64)])
        trained = np.diff(sums[samples.offsets])
        first = first & np.append(samples.mask, False)[samples.offsets[:-1]]
    costs = counts * (counts + 1) // 2
    numbers = [
        pa.array(counts.astype(np.int32)),
        pa.array(costs),
        pa.array(trained.astype(np.int32)),
        pa.array((trained - first).astype(np.int32)),
        pa.array(samples.rows),
    ]
    kind = None if samples.extra is None else samples.extra.type
    schema = shard_schema(vocab_size, masked=samples.mask is not None, split=samples.places is not None, extra=kind)
    offsets = pa.array(samples.offsets)
    ids = pa.array(samples.ids, pa.uint32()).cast(schema.field("input_ids").type.value_type)
    lists = [pa.LargeListArray.from_arrays(offsets, ids, type=schema.field("input_ids").type)]
    if samples.mask is not None:
        mask = pa.array(samples.mask)
        lists.append(pa.LargeListArray.from_arrays(offsets, mask, type=schema.field("loss_mask").type))
    places = [] if samples.places is None else [pa.array(samples.places)]
    places += [] if samples.extra is None else [samples.extra]
    receipt = Receipt(
        key=key,
        rows=len(counts),
        tokens=int(samples.offsets[-1]),
        trained_tokens=int(trained.sum()),
        attention_cost=int(costs.sum()),
        records=samples.records,
        data=_write_batch(store, data_path(key), pa.record_batch([*lists, *numbers, *places], schema=schema)),
        meta=_write_batch(store, meta_path(key), pa.record_batch(numbers, schema=META_SCHEMA)),
        rejected=dict(sorted(Counter(reject.reason for reject in samples.rejects).items())),
        dropped=samples.dropped,
        truncated=samples.truncated,
        truncated_tokens=samples.truncated_tokens,
        split=samples.split,
        fragments=samples.fragments,
    )
    sidecar = None
    if samples.rejects:
        lines = b"".join(orjson.dumps(asdict(item)) + b"\n" for item in samples.rejects)
        store.write(rejected_path(key), lines)
        sidecar = FileInfo(len(lines), digest_bytes(lines))
    store.write(receipt_path(key), ReceiptFile(receipt, sidecar, made_by or {}).dump())
    return receipt


def _write_batch(store: Store, path: str, batch: pa.RecordBatch) -> FileInfo:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    buffer = sink.getvalue()
    store.write(path, buffer)
    return FileInfo(buffer.size, digest_bytes(buffer))


def find_shard(store: Store, key: str) -> tuple[Receipt | None, str]:
    """Return a shard's receipt, or None and why it is not there: ``absent`` or ``damaged``."""
    stored, why = find_stored(store, key)
    return (None if stored is None else stored.receipt), why


def find_stored(store: Store, key: str) -> tuple[ReceiptFile | None, str]:
    """Return a shard's receipt file, or None and why it is not there: ``absent`` or ``damaged``.

    Looks at the lengths of its files, not at their bytes: those are checked by whoever reads them first, and by
    ``verify``, which moves a damaged one aside.
    """
    try:
        stored = read_receipt(store, key)
    except NotFound:
        return None, "absent"
    except Damaged:
        return None, "damaged"
    if any(store.size(path) != info.bytes for path, info in stored_files(stored).items()):
        return None, "damaged"
    return stored, ""


def stored_files(stored: ReceiptFile) -> dict[str, FileInfo]:
    """Return the files that a shard must have beside its receipt, by store key."""
    receipt = stored.receipt
    files = {data_path(receipt.key): receipt.data, meta_path(receipt.key): receipt.meta}
    return files if stored.sidecar is None else files | {rejected_path(receipt.key): stored.sidecar}


def check_there(store: Store, receipts: Iterable[Receipt]) -> None:
    """Raise ``Unavailable`` unless each shard is still in the store: a dataset never names one that is not.

    A store can be emptied, unmounted or replaced while a job runs, and what comes later is written where it was.
    """
    keys = sorted({receipt.key for receipt in receipts})
    sizes = store.sizes([receipt_path(key) for key in keys])
    gone = [key for key, size in zip(keys, sizes, strict=True) if size is None]
    if gone:
        fact = f"{len(gone):,} of {len(keys):,} shards of this job are gone from the store {store.location} ({gone[0]})"
        raise Unavailable(fact, "see to it that nothing empties it or takes it away, and submit the job again")


def read_rejects(store: ReadStore, key: str) -> list[dict[str, Any]]:
    """Return a shard's quarantine entries: row, offset and length in the block, reason, detail.

    Raises ``NotFound`` where it has none.
    """
    return [orjson.loads(line) for line in bytes(store.open(rejected_path(key))).splitlines()]
