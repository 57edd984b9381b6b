"""Shards: the same bytes each time, the receipt last, and damage found."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from packhouse.client.errors import Damaged, NotFound
from packhouse.client.format import (
    META_SCHEMA,
    Receipt,
    data_path,
    meta_path,
    read_meta,
    read_shard,
    receipt_path,
    rejected_path,
)
from packhouse.client.store import LocalStore
from packhouse.worker.records import Reject
from packhouse.worker.shards import find_shard, read_rejects, write_shard
from packhouse.worker.tokenize import Samples

KEY = "ab" * 16
LISTS = [[5, 6, 7], [], [264], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
MASKS = [[0, 1, 1], [], [1], [0, 0, 0, 0, 0, 0, 0, 0, 1]]


def samples(*, masked: bool = True, rejects: int = 1) -> Samples:
    flat = np.array([token for ids in LISTS for token in ids], np.uint32)
    mask = np.array([bit for bits in MASKS for bit in bits], np.bool_) if masked else None
    offsets = np.cumsum([0, *map(len, LISTS)], dtype=np.int64)
    bad = [Reject(7 + row, 99, 3, "invalid_json", "unexpected end") for row in range(rejects)]
    rows = np.array([0, 1, 3, 9], np.int32)
    return Samples(flat, offsets, mask, rows, 4 + rejects, bad, 0, 1, 5, Counter(), 2, "huggingface")


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("vocab", "kind"), [(265, np.uint16), (65_536, np.uint16), (65_537, np.uint32)])
def test_a_shard_reads_back_as_it_was_written(tmp_path: Path, masked: bool, vocab: int, kind: type) -> None:
    store = LocalStore(tmp_path)
    receipt = write_shard(store, KEY, samples(masked=masked), vocab)
    shard = read_shard(store, receipt)
    assert shard.input_ids.dtype == kind
    cuts = list(zip(shard.offsets[:-1], shard.offsets[1:], strict=True))
    assert [shard.input_ids[a:b].tolist() for a, b in cuts] == LISTS
    expected = MASKS if masked else [[1] * len(ids) for ids in LISTS]
    assert [shard.mask(a, b).astype(int).tolist() for a, b in cuts] == expected
    assert (shard.mask_bits is None) == (not masked)
    meta = read_meta(store, receipt)
    assert meta.schema == META_SCHEMA
    assert meta.to_pydict() == {
        "num_tokens": [3, 0, 1, 9],
        "attention_cost": [6, 0, 1, 45],
        "trained_tokens": [2, 0, 1, 1] if masked else [3, 0, 1, 9],
        "labels": [sum(mask[1:]) for mask in MASKS] if masked else [2, 0, 0, 8],
        "row": [0, 1, 3, 9],
    }
    sums = (receipt.rows, receipt.tokens, receipt.attention_cost, receipt.records, receipt.truncated_tokens)
    assert sums == (4, 13, 52, 5, 5)
    assert receipt.trained_tokens == (4 if masked else 13)
    assert receipt.rejected == {"invalid_json": 1}


def test_b029_ids_keep_their_value_up_to_the_last(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    made = samples()
    made.ids[:] = [0, 1, 65_535, 65_536, 92_543, *range(8)]
    shard = read_shard(store, write_shard(store, KEY, made, 92_544))
    assert shard.input_ids.tolist() == made.ids.tolist()
    with pytest.raises(pa.ArrowInvalid):  # never wraps
        write_shard(store, KEY, made, 65_536)


def test_written_twice_the_bytes_are_the_same(tmp_path: Path) -> None:
    stores = [LocalStore(tmp_path / name) for name in ("a", "b")]
    for store in stores:
        write_shard(store, KEY, samples(), 265)
    files = [list(store.list("shards")) for store in stores]
    assert files[0] == files[1] == sorted(p(KEY) for p in (data_path, meta_path, receipt_path, rejected_path))
    for name in files[0]:
        assert bytes(stores[0].open(name)) == bytes(stores[1].open(name))


class FullAfter(LocalStore):
    """A store whose disk is full after some writes."""

    def __init__(self, root: Path, writes: int) -> None:
        super().__init__(root)
        self.left = writes

    def write(self, key: str, data: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(28, "No space left on device")
        super().write(key, data)


def test_the_receipt_is_written_last(tmp_path: Path) -> None:
    for writes in range(4):
        store = FullAfter(tmp_path / str(writes), writes)
        with pytest.raises(OSError, match="No space"):
            write_shard(store, KEY, samples(), 265)
        assert find_shard(store, KEY) == (None, "absent")
        assert len(list(store.list("shards"))) == writes
    receipt = write_shard(FullAfter(tmp_path / "0", 4), KEY, samples(), 265)
    assert find_shard(LocalStore(tmp_path / "0"), KEY) == (receipt, "")


@pytest.mark.parametrize("path", [data_path, meta_path, rejected_path])
@pytest.mark.parametrize("harm", ["cut", "gone", "longer"])
def test_a_file_that_is_cut_or_gone_makes_a_shard_damaged(tmp_path: Path, path: Any, harm: str) -> None:
    store = LocalStore(tmp_path)
    receipt = write_shard(store, KEY, samples(), 265)
    name = path(KEY)
    content = bytes(store.open(name))
    if harm == "gone":
        store.delete(name)
    elif path is not rejected_path or harm == "cut":
        store.write(name, content + b"x" if harm == "longer" else content[:-1] if path is not rejected_path else b"")
    else:
        return
    assert find_shard(store, KEY) == (None, "damaged")
    write_shard(store, KEY, samples(), 265)
    assert find_shard(store, KEY) == (receipt, "")


@pytest.mark.parametrize(
    "receipt", [b"", b"{", b"[]", b"null", b"{}", b'{"key": 1}', b"\xff", b'{"data": "x", "meta": []}']
)
def test_a_receipt_that_cannot_be_read_makes_a_shard_damaged(tmp_path: Path, receipt: bytes) -> None:
    store = LocalStore(tmp_path)
    write_shard(store, KEY, samples(), 265)
    store.write(receipt_path(KEY), receipt)
    assert find_shard(store, KEY) == (None, "damaged")


def test_a_receipt_in_another_shards_place_is_damage(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    write_shard(store, KEY, samples(), 265)
    other = "ab" + "0" * 30
    for path in (data_path, meta_path, receipt_path):
        store.write(path(other), store.open(path(KEY)))
    assert find_shard(store, other) == (None, "damaged")


@pytest.mark.parametrize("read", [read_shard, read_meta])
def test_a_flipped_byte_is_found_by_whoever_reads(tmp_path: Path, read: Any) -> None:
    store = LocalStore(tmp_path)
    receipt = write_shard(store, KEY, samples(), 265)
    name = (data_path if read is read_shard else meta_path)(KEY)
    content = bytearray(store.open(name))
    for place in (0, len(content) // 2, len(content) - 1):
        content[place] ^= 1
        store.write(name, bytes(content))
        with pytest.raises(Damaged, match=f"bytes of {name} are not those its manifest states"):
            read(store, receipt)
        content[place] ^= 1
    store.write(name, bytes(content[:-1]))
    with pytest.raises(Damaged, match="bytes and its manifest says"):
        read(store, receipt)
    store.delete(name)
    with pytest.raises(NotFound):
        read(store, receipt)


def test_an_empty_shard(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    none = np.zeros(0, np.uint32)
    for mask in (None, np.zeros(0, np.bool_)):
        empty = Samples(none, np.zeros(1, np.int64), mask, np.zeros(0, np.int32))
        receipt = write_shard(store, KEY, empty, 265)
        assert find_shard(store, KEY) == (receipt, "")
        assert (receipt.rows, receipt.tokens, read_meta(store, receipt).num_rows) == (0, 0, 0)
        shard = read_shard(store, receipt)
        assert (len(shard.input_ids), shard.offsets.tolist(), len(shard.mask(0, 0))) == (0, [0], 0)


def test_quarantine_entries_come_back(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    write_shard(store, KEY, samples(rejects=3), 265)
    entries = read_rejects(store, KEY)
    assert [Reject(**entry) for entry in entries] == samples(rejects=3).rejects
    with pytest.raises(NotFound, match="has no shards/cd"):
        read_rejects(store, "cd" * 16)


def test_a_receipt_survives_json(tmp_path: Path) -> None:
    receipt = write_shard(LocalStore(tmp_path), KEY, samples(), 265)
    assert Receipt.from_json(receipt.to_json()) == receipt
