"""Formats: schemas by vocabulary, manifests by content, masks by bits."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from packhouse.client.errors import Damaged, NotFound
from packhouse.client.format import (
    FileInfo,
    Manifest,
    Receipt,
    Shard,
    data_path,
    manifest_path,
    meta_path,
    read_manifest,
    read_meta,
    read_shard,
    receipt_path,
    rejected_path,
    shard_schema,
)

INFO = FileInfo(10, "d" * 32)


def receipt(key: str = "ab" * 16, **fields: Any) -> Receipt:
    return Receipt(key, rows=2, tokens=5, trained_tokens=4, attention_cost=9, records=3, data=INFO, meta=INFO, **fields)


@pytest.mark.parametrize(
    ("vocab", "kind"), [(1, "uint16"), (65_535, "uint16"), (65_536, "uint16"), (65_537, "uint32"), (151_669, "uint32")]
)
def test_ids_have_the_narrowest_type_that_holds_the_vocabulary(vocab: int, kind: str) -> None:
    schema = shard_schema(vocab, masked=True)
    assert schema.field("input_ids").type == pa.large_list(pa.field("item", kind, nullable=False))
    assert np.iinfo(kind).max >= vocab - 1
    assert "loss_mask" in schema.names
    assert "loss_mask" not in shard_schema(vocab, masked=False).names


def test_the_paths_of_a_shard_differ() -> None:
    paths = {path("ab" * 16) for path in (data_path, meta_path, rejected_path, receipt_path)}
    assert len(paths) == 4
    assert all(path.startswith(f"shards/ab/{'ab' * 16}.") for path in paths)


def test_the_id_of_a_dataset_is_that_of_recipe_and_shards_in_order() -> None:
    a, b = receipt("aa" * 16), receipt("bb" * 16)
    manifest = Manifest({"kind": "text"}, 265, (a, b))
    assert Manifest({"kind": "text"}, 265, (a, b)).id == manifest.id
    for other in (
        Manifest({"kind": "chat"}, 265, (a, b)),
        Manifest({"kind": "text"}, 265, (b, a)),
        Manifest({"kind": "text"}, 265, (a,)),
        Manifest({"kind": "text"}, 265, (a, b, b)),
    ):
        assert other.id != manifest.id
    rewritten = Manifest({"kind": "text"}, 265, (replace(a, data=FileInfo(11, "e" * 32)), b))
    assert rewritten.id == manifest.id, "another version of a library may write other bytes of the same content"
    assert (manifest.rows, manifest.tokens) == (4, 10)
    assert (Manifest({}, 1, ()).rows, Manifest({}, 1, ()).tokens) == (0, 0)


def test_a_manifest_comes_back_and_is_the_same_bytes(memory_store: type[Any]) -> None:
    manifest = Manifest({"kind": "text", "é": None}, 265, (receipt(rejected={"x": 1}, dropped=2), receipt("cd" * 16)))
    store = memory_store()
    store.write(manifest_path(manifest.id), manifest.dump())
    again = read_manifest(store, manifest.id)
    assert again == manifest
    assert again.dump() == manifest.dump()
    with pytest.raises(NotFound):
        read_manifest(store, "0" * 32)


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: b"[]",
        lambda data: b"null",
        lambda data: b"\xff" + data,
        lambda data: data.replace(b'"shards"', b'"sherds"'),
        lambda data: data.replace(b'"rows"', b'"rowz"'),
        lambda data: data.replace(b"abab", b"abac", 1),
        lambda data: data.replace(b'"kind":"text"', b'"kind":"chat"'),
        lambda data: json.dumps(json.loads(data) | {"shards": []}).encode(),
        lambda data: json.dumps(json.loads(data) | {"shards": 7}).encode(),
    ],
)
def test_a_manifest_that_was_altered_is_damaged(harm: Callable[[bytes], bytes]) -> None:
    manifest = Manifest({"kind": "text"}, 265, (receipt(),))
    with pytest.raises(Damaged, match=f"manifest of dataset {manifest.id}"):
        Manifest.load(harm(manifest.dump()), manifest.id)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 20), (3, 5), (7, 9), (8, 16), (15, 20), (19, 20)])
def test_mask_bits_are_read_from_any_place(start: int, stop: int) -> None:
    mask = np.array([1, 0, 0, 1, 1, 1, 0, 1, 0, 1, 1, 0, 0, 0, 1, 0, 1, 1, 1, 0], np.bool_)
    offsets, ids = np.array([0, 20], np.int64), np.zeros(20, np.uint16)
    shard = Shard(offsets, ids, np.packbits(mask, bitorder="little"))
    assert shard.mask(start, stop).tolist() == mask[start:stop].tolist()
    assert shard.mask(start, stop).dtype == np.bool_
    assert Shard(offsets, ids, None).mask(start, stop).all()


def test_a_shard_of_other_rows_than_its_receipt_says_is_damaged(
    memory_store: type[Any], write_dataset: Callable[..., str]
) -> None:
    store = memory_store()
    dataset = write_dataset(store, [[1, 2], [3]], [[1, 0], [1]])
    (shard,) = read_manifest(store, dataset).shards
    assert read_shard(store, shard).input_ids.tolist() == [1, 2, 3]
    for read in (read_shard, read_meta):
        with pytest.raises(Damaged, match="has 2 rows and its manifest says 3"):
            read(store, replace(shard, rows=3))


@pytest.mark.parametrize("content", [b"ARROW1\0\0", b"not Arrow at all"])
def test_a_file_that_is_not_arrow_is_damaged_though_its_digest_is_right(
    memory_store: type[Any], write_dataset: Callable[..., str], content: bytes
) -> None:
    from packhouse.client.digest import digest_bytes

    store = memory_store()
    (shard,) = read_manifest(store, write_dataset(store, [[1]])).shards
    store.write(data_path(shard.key), content)
    wrong = replace(shard, data=FileInfo(len(content), digest_bytes(content)))
    with pytest.raises(Damaged, match=shard.key):
        read_shard(store, wrong)
