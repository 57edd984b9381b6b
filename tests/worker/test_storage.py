"""Faults that other projects had with stored data: readers and writers at once, narrow ids, far offsets."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.worker.crash import digests, run_job

from packhouse.client import PackedDataset, PlanSpec, faults
from packhouse.client.errors import NotFound
from packhouse.client.format import Manifest, Shard, data_path, read_manifest, read_meta, read_shard
from packhouse.client.kernel import KernelName
from packhouse.client.pack import PackBuilder
from packhouse.client.plan import PlanFile
from packhouse.client.receipt_file import read_receipt
from packhouse.client.store import LocalStore
from packhouse.client.wire import JobSpec
from packhouse.worker.plans import build_plan


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> JobSpec:
    folder = tmp_path_factory.mktemp("sources")
    for number in range(3):
        lines = [json.dumps({"text": f"{number} {row} " + "ab:/ " * row}) for row in range(60)]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    return JobSpec(sources=[str(folder)], tokenizer=str(tiny))


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[list[BaseException]]:
    """Do ``work`` again and again in a thread, until the context ends or it fails."""
    ended, failed = threading.Event(), list[BaseException]()

    def go_on() -> None:
        try:
            while not ended.is_set():
                work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield failed
    finally:
        ended.set()
        thread.join()


def test_b028_a_reader_with_a_memory_map_while_the_shards_are_built_again(tmp_path: Path, spec: JobSpec) -> None:
    store = LocalStore(tmp_path)
    ran = run_job(store, spec)
    plan = build_plan(store, PlanSpec(datasets=[ran.dataset], pack_length=256), write=True)

    def stream() -> list[Any]:
        packs = PackedDataset(PlanFile.open(store, plan.id), store, rank=0, world=1)
        return [data["input_ids"].flatten().tolist() for data, _ in packs]

    expected, before, again = stream(), digests(store), []

    def build_again() -> None:
        for shard in read_manifest(store, ran.dataset).shards:
            store.path(data_path(shard.key)).with_suffix(".json").unlink()
        again.append(run_job(store, spec))

    packs = iter(PackedDataset(PlanFile.open(store, plan.id), store, rank=0, world=1))
    begun = [next(packs)[0]["input_ids"].flatten().tolist()]
    with meanwhile(build_again) as failed:
        while len(again) < 3 and not failed:
            assert stream() == expected
        # One that opened its shards before they were built again.
        assert begun + [data["input_ids"].flatten().tolist() for data, _ in packs] == expected
    assert not failed
    assert all((one.dataset, one.hits) == (ran.dataset, 0) for one in again)
    assert digests(store) == before


def test_b081_a_file_that_is_being_written_is_absent_or_whole(tmp_path: Path, spec: JobSpec) -> None:
    store, seen = LocalStore(tmp_path), {"absent": 0, "whole": 0}
    ran = run_job(store, spec)
    shards = read_manifest(store, ran.dataset).shards

    reads: list[Callable[[], object]] = [lambda: read_manifest(store, ran.dataset)]
    reads += [partial(read_receipt, store, shard.key) for shard in shards]
    reads += [partial(read_meta, store, shard) for shard in shards]

    def poll() -> None:
        for read in reads:
            try:
                read()
                seen["whole"] += 1
            except NotFound:
                seen["absent"] += 1

    file = tmp_path / "faults.json"
    file.write_text(json.dumps([{"point": faults.HALF_WRITTEN, "action": "delay", "seconds": 0.01, "times": 60}]))
    faults.use(file)
    try:
        with meanwhile(poll) as failed:
            for _ in range(4):
                for folder in ("datasets", "shards"):
                    for key in list(store.list(folder)):
                        store.delete(key)
                run_job(store, spec)
    finally:
        faults.use(None)
    assert not failed
    assert seen["absent"]
    assert seen["whole"]


SPARSE = {"<unk>": 0, "a": 1, "m": 65_535, "n": 65_536, "z": 92_543}
FULL = {"<unk>": 0, **{f"w{number}": number for number in range(1, 65_536)}}


@pytest.mark.parametrize(
    ("vocab", "added", "text", "ids"),
    [
        (SPARSE, {}, "a m n z", [1, 65_535, 65_536, 92_543]),
        # Without its added token this vocabulary would fit 16 bits.
        (FULL, {"z": 65_536}, "w1 w65535 z", [1, 65_535, 65_536]),
    ],
    ids=["sparse", "added"],
)
def test_b029_ids_above_16_bits_keep_their_value(
    tmp_path: Path, vocab: dict[str, int], added: dict[str, int], text: str, ids: list[int]
) -> None:
    folder, flags = tmp_path / "tokenizer", ("special", "normalized", "single_word", "lstrip", "rstrip")
    folder.mkdir()
    backend = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            dict.fromkeys(flags, False) | {"content": word, "id": number} for word, number in added.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": text}) + "\n")
    store = LocalStore(tmp_path / "store")
    spec = JobSpec(sources=[str(tmp_path / "in.jsonl")], tokenizer=str(folder), add_bos=False, add_eos=False)
    ran = run_job(store, spec)
    (receipt,) = read_manifest(store, ran.dataset).shards
    shard = read_shard(store, receipt)
    assert shard.input_ids.tolist() == ids
    assert shard.input_ids.dtype == np.uint32
    plan = build_plan(store, PlanSpec(datasets=[ran.dataset], pack_length=len(ids)), write=True)
    ((data, _),) = PackedDataset(PlanFile.open(store, plan.id), store, rank=0, world=1)
    assert data["input_ids"].flatten().tolist() == ids


def test_b030_offsets_of_a_shard_are_64_bits_from_disk_to_packs(tmp_path: Path, spec: JobSpec) -> None:
    store = LocalStore(tmp_path)
    manifest: Manifest = read_manifest(store, run_job(store, spec).dataset)
    for receipt in manifest.shards:
        schema = pa.ipc.open_file(store.open(data_path(receipt.key))).schema
        assert pa.types.is_large_list(schema.field("input_ids").type)
        assert read_shard(store, receipt).offsets.dtype == np.int64


@pytest.mark.parametrize("kernel", ["numba", "numpy"])
def test_b030_packs_are_built_from_behind_two_to_the_31(
    tmp_path: Path, memory_store: Any, write_dataset: Any, monkeypatch: pytest.MonkeyPatch, kernel: KernelName
) -> None:
    """The shard is a file of six gigabytes that takes no room: all but its last sample is a hole."""
    store, samples = memory_store(), [[1, 2, 3, 4]] * 3 + [[5, 6, 7, 8]]
    dataset = write_dataset(store, samples, rows_per_shard=4)
    plan = build_plan(store, PlanSpec(datasets=[dataset], pack_length=4, strategy="none", seed=None), write=True)
    offsets = np.array([0, 1 << 30, 1 << 31, 3 << 30, (3 << 30) + 4], np.int64)
    ids = np.memmap(tmp_path / "ids", np.uint16, "w+", shape=(int(offsets[-1]),))
    ids[-4:] = samples[-1]
    monkeypatch.setattr("packhouse.client.shards.read_shard", lambda *_, **__: Shard(offsets, ids, None))
    file = PlanFile.open(store, plan.id)
    *_, last = PackBuilder(file.header, store, kernel=kernel).build(file.packs, 0, 4)
    assert last.input_ids.tolist() == samples[-1]
    assert last.labels.tolist() == [6, 7, 8, -100]
