"""Shards on disk: from a block's samples to three files and a receipt, written in the order that makes it safe."""

import json
from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from packhouse.client.digest import canonical_json, digest_bytes
from packhouse.client.errors import NotFound
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
from packhouse.client.store import Store
from packhouse.worker.tokenize import Samples


def write_shard(store: Store, key: str, samples: Samples, vocab_size: int) -> Receipt:
    """Write a shard's files, its receipt last, and return the receipt.

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
    schema = shard_schema(vocab_size, masked=samples.mask is not None, split=samples.places is not None)
    offsets = pa.array(samples.offsets)
    ids = pa.array(samples.ids, pa.uint32()).cast(schema.field("input_ids").type.value_type)
    lists = [pa.LargeListArray.from_arrays(offsets, ids, type=schema.field("input_ids").type)]
    if samples.mask is not None:
        mask = pa.array(samples.mask)
        lists.append(pa.LargeListArray.from_arrays(offsets, mask, type=schema.field("loss_mask").type))
    places = [] if samples.places is None else [pa.array(samples.places)]
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
    if samples.rejects:
        store.write(rejected_path(key), b"".join(orjson.dumps(asdict(item)) + b"\n" for item in samples.rejects))
    store.write(receipt_path(key), canonical_json(receipt.to_json()))
    return receipt


def _write_batch(store: Store, path: str, batch: pa.RecordBatch) -> FileInfo:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    buffer = sink.getvalue()
    store.write(path, buffer)
    return FileInfo(buffer.size, digest_bytes(buffer))


def find_shard(store: Store, key: str) -> tuple[Receipt | None, str]:
    """Return a shard's receipt, or None and why it is not there: ``absent`` or ``damaged``.

    Looks at the lengths of its files, not at their bytes: those are checked by whoever reads them first.
    """
    try:
        receipt = Receipt.from_json(json.loads(bytes(store.open(receipt_path(key)))))
    except NotFound:
        return None, "absent"
    except (ValueError, TypeError, KeyError):
        return None, "damaged"
    expected = {data_path(key): receipt.data.bytes, meta_path(key): receipt.meta.bytes}
    if receipt.key != key or any(store.size(path) != size for path, size in expected.items()):
        return None, "damaged"
    if receipt.rejected and not store.size(rejected_path(key)):
        return None, "damaged"
    return receipt, ""


def read_rejects(store: Store, key: str) -> list[dict[str, Any]]:
    """Return a shard's quarantine entries: row, offset and length in the block, reason, detail."""
    try:
        text = bytes(store.open(rejected_path(key)))
    except NotFound:
        return []
    return [orjson.loads(line) for line in text.splitlines()]
