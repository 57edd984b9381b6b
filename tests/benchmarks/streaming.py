"""Streaming packed batches, measured: packhouse, a plain memory copy (the ceiling) and the peers that are installed.

Long documents, and short chats with a loss mask; ids of a 151,936-token vocabulary. All in one run on the same data,
each in a process of its own. Run it with ``make bench``.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from packhouse.client.digest import digest_bytes, digest_json
from packhouse.client.format import (
    META_SCHEMA,
    FileInfo,
    Manifest,
    Receipt,
    data_path,
    manifest_path,
    meta_path,
    shard_schema,
)
from packhouse.client.plan import PlanFile
from packhouse.client.store import LocalStore
from packhouse.client.wire_plans import PlanSpec

VOCABULARY = 151_936
TOKENS = 16_000_000
SHARDS = 4
PACK_LENGTH, PACKS = 4096, 8
KINDS = {"long": (3000, False), "chat": (220, True)}
"""Mean tokens of a sample, and whether some are masked."""
LIMIT = 2.0
"""Seconds that a part is measured for."""
ROUNDS = 2
"""Times that a part is measured; the fastest counts, since other work on the machine can only slow it down."""


def write_data(store: LocalStore, kind: str) -> str:
    """Write a dataset of random ids and return its id."""
    mean, masked = KINDS[kind]
    chance = np.random.default_rng(mean)
    shards = []
    for number in range(SHARDS):
        lengths = np.maximum(2, chance.exponential(mean, TOKENS // mean // SHARDS)).astype(np.int64)
        shards.append(_write_shard(store, lengths, masked, f"{kind}{number}", chance))
    manifest = Manifest({"tokenizer": "0" * 32}, VOCABULARY, tuple(shards))
    store.write(manifest_path(manifest.id), manifest.dump())
    return manifest.id


def _write_shard(
    store: LocalStore, lengths: np.ndarray[Any, Any], masked: bool, name: str, chance: np.random.Generator
) -> Receipt:
    tokens, schema = int(lengths.sum()), shard_schema(VOCABULARY, masked=masked)
    offsets = pa.array(np.append(0, np.cumsum(lengths)))
    values = {"input_ids": pa.array(chance.integers(1, VOCABULARY, tokens, dtype=np.uint32))}
    if masked:
        values["loss_mask"] = pa.array(chance.random(tokens) < 0.5)
    lists = [
        pa.LargeListArray.from_arrays(offsets, value, type=schema.field(column).type)
        for column, value in values.items()
    ]
    numbers = [lengths.astype(np.int32), lengths * (lengths + 1) // 2, lengths.astype(np.int32)]
    numbers.append((lengths - 1).astype(np.int32))
    meta = [pa.array(column) for column in [*numbers, np.arange(len(lengths), dtype=np.int32)]]
    key = digest_json(name)
    files: list[FileInfo] = []
    for path, columns, kind in ((data_path, lists + meta, schema), (meta_path, meta, META_SCHEMA)):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, kind) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=kind))
        data = sink.getvalue()
        store.write(path(key), data)
        files.append(FileInfo(data.size, digest_bytes(data)))
    return Receipt(key, len(lengths), tokens, tokens, 0, len(lengths), files[0], files[1])


def packhouse(folder: str, plan_id: str, kernel: str, workers: int) -> dict[str, Any]:
    """Iterate a plan as a trainer does; the clock for the first batch starts when the plan is known."""
    from packhouse.client import Options, PackedDataset, loader

    store = LocalStore(folder)
    plan = PlanFile.open(store, plan_id)
    start = time.perf_counter()
    dataset = PackedDataset(plan, store, options=Options(kernel=kernel))  # type: ignore[arg-type]
    batches = iter(loader(dataset, workers=workers, method="fork", prefetch_bytes=1 << 28) if workers else dataset)
    next(batches)
    first = time.perf_counter() - start
    next(batches)
    second = time.perf_counter() - start - first
    return {"first_batch_s": first, "second_batch_s": second, **_rate(data["input_ids"] for data, _ in batches)}


def _rate(batches: Iterator[Any]) -> dict[str, float]:
    for _ in zip(range(3), batches, strict=False):
        pass  # what is compiled or mapped once
    start, cpu, tokens, passed = time.perf_counter(), time.process_time(), 0, 0.0
    for batch in batches:
        tokens += batch.numel()
        passed = time.perf_counter() - start
        if passed > LIMIT:
            break
    return {"tokens": tokens, "seconds": passed, "cpu_s": time.process_time() - cpu}


def copy() -> dict[str, Any]:
    """Copy ids, labels and positions of a step from memory to memory, as fast as NumPy does."""
    size = PACK_LENGTH * PACKS
    source = np.ones((200, 3, size), np.int64)  # larger than any cache
    start, cpu, tokens = time.perf_counter(), time.process_time(), 0
    while (passed := time.perf_counter() - start) < LIMIT / 2:
        for step in source:
            tokens += step.copy().shape[1]
    return {"tokens": tokens, "seconds": passed, "cpu_s": time.process_time() - cpu}


def hf_datasets(folder: str, dataset_id: str) -> dict[str, Any]:
    """Read samples by ``datasets`` in torch format, one by one, unpacked: what there is to build packs from."""
    import datasets

    from packhouse.client.format import read_manifest

    manifest = read_manifest(LocalStore(folder), dataset_id)
    table = pa.ipc.open_file(f"{folder}/{data_path(manifest.shards[0].key)}").read_all().select(["input_ids"])
    path = f"{folder}/{dataset_id}.hf.arrow"
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    start = time.perf_counter()
    rows = iter(datasets.Dataset.from_file(path).with_format("torch"))
    next(rows)
    return {"first_batch_s": time.perf_counter() - start, **_rate(row["input_ids"] for row in rows)}


def litdata(folder: str, dataset_id: str) -> dict[str, Any]:
    """Read blocks of ids by litdata's TokensLoader, which gives views on its file: no packs, labels or positions."""
    from litdata import StreamingDataset, TokensLoader, optimize

    ids = np.concatenate([np.asarray(row, np.int32) for row in _samples(folder, dataset_id)])
    np.save(f"{folder}/litdata.npy", ids)
    loader, out = TokensLoader(), f"{folder}/litdata-{dataset_id}"
    optimize(_load_ids, [f"{folder}/litdata.npy"], out, chunk_size=1 << 22, num_workers=1, item_loader=loader)
    start = time.perf_counter()
    rows = iter(StreamingDataset(out, item_loader=TokensLoader(block_size=PACK_LENGTH), shuffle=True))
    next(rows)
    return {"first_batch_s": time.perf_counter() - start, **_rate(rows)}


def _load_ids(path: str) -> Iterator[Any]:
    import torch

    yield torch.from_numpy(np.load(path))


def mosaic(folder: str, dataset_id: str) -> dict[str, Any]:
    """Read samples by MosaicML's StreamingDataset, one by one, unpacked."""
    here = sys.path.pop(0)  # this file has the name of their package
    from streaming import MDSWriter, StreamingDataset  # type: ignore[attr-defined]

    sys.path.insert(0, here)
    out = f"{folder}/mosaic-{dataset_id}"
    with MDSWriter(out=out, columns={"input_ids": "ndarray:uint32"}) as writer:
        for row in _samples(folder, dataset_id):
            writer.write({"input_ids": np.asarray(row, np.uint32)})
    start = time.perf_counter()
    rows = iter(StreamingDataset(local=out, batch_size=1, shuffle=True))
    next(rows)
    import torch

    return {
        "first_batch_s": time.perf_counter() - start,
        **_rate(torch.from_numpy(row["input_ids"].view(np.int32)) for row in rows),
    }


def _samples(folder: str, dataset_id: str) -> Iterator[Any]:
    """Yield samples of about a million tokens: peers read them over and over, or stop at their end."""
    from packhouse.client.format import read_manifest, read_shard

    store = LocalStore(folder)
    shard, seen = read_shard(store, read_manifest(store, dataset_id).shards[0]), 0
    for begin, end in pairwise(shard.offsets.tolist()):
        yield shard.input_ids[begin:end]
        seen += end - begin
        if seen > 4_000_000:
            return


def memory(folder: str, plan_id: str) -> dict[str, Any]:
    """Take 10,000 steps; return the process's own memory after 1,000 and at the end, in bytes."""
    from packhouse.client import PackedDataset

    store = LocalStore(folder)
    seen: dict[int, int] = {}
    for data, _ in PackedDataset(PlanFile.open(store, plan_id), store):
        if data["step"] in (1_000, 9_999):
            seen[data["step"]] = _own_memory()
    return {"steps": data["step"] + 1, "after_1000": seen[1_000], "after_10000": seen[9_999]}


def _own_memory() -> int:
    """Return the bytes of this process that are not mapped files: those are the page cache's."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "packhouse": packhouse,
    "copy": copy,
    "datasets": hf_datasets,
    "litdata": litdata,
    "mosaic": mosaic,
    "memory": memory,
}


def apart(part: str, *arguments: Any) -> dict[str, Any]:
    """Run one part in a process of its own and return what it measured."""
    command = [sys.executable, "-W", "ignore", __file__, "--part", part, "--arguments", json.dumps(arguments)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise PartFailed(done.stderr.strip().splitlines()[-1])
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "tokens" in measured:
        measured["mtokens_per_s"] = measured["tokens"] / measured["seconds"] / 1e6
        measured["mtokens_per_cpu_s"] = measured["tokens"] / measured["cpu_s"] / 1e6
    return measured


class PartFailed(Exception):
    """A part's process failed; the message is the last line that it wrote."""


def fastest(part: str, *arguments: Any) -> dict[str, Any]:
    """Return the fastest of ``ROUNDS`` runs of a part."""
    return max((apart(part, *arguments) for _ in range(ROUNDS)), key=lambda run: float(run["mtokens_per_s"]))


def measure(folder: Path) -> dict[str, Any]:
    """Run all parts and return their figures."""
    from packhouse.worker.plans import build_plan

    store, root = LocalStore(folder), str(folder)
    figures: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "tokens": TOKENS, "kinds": {}, "skipped": {}}
    for kind in KINDS:
        dataset = write_data(store, kind)
        spec = PlanSpec(datasets=[dataset], pack_length=PACK_LENGTH, micro_batches=PACKS, epochs=20)
        plan = build_plan(store, spec)
        runs = {
            "memory copy (the ceiling)": fastest("copy"),
            "packhouse": fastest("packhouse", root, plan.id, "auto", 0),
            "packhouse, NumPy kernel": apart("packhouse", root, plan.id, "numpy", 0),
            "packhouse, two workers": apart("packhouse", root, plan.id, "auto", 2),
            "datasets, torch (no packs)": apart("datasets", root, dataset),
        }
        for name, part in (("litdata (no packs, views)", "litdata"), ("MosaicML streaming (no packs)", "mosaic")):
            try:
                runs[name] = apart(part, root, dataset)
            except PartFailed as failure:
                figures["skipped"][part] = str(failure)
        figures["kinds"][kind] = {"padding": plan.report.padding, "runs": runs}
    small = spec.model_copy(update={"micro_batches": 1, "epochs": 1, "pack_length": 1024})
    figures["memory"] = apart("memory", root, build_plan(store, small).id)
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table."""
    columns = ("samples", "reader", "Mtoken/s", "by CPU time", "of ceiling", "first batch s")
    table = Table(*columns, title="Packed batches from shards")
    for kind, found in figures["kinds"].items():
        runs = found["runs"]
        ceiling = runs["memory copy (the ceiling)"]["mtokens_per_cpu_s"]
        for name, run in runs.items():
            # Work of loader workers is not in the CPU time of the process that measures.
            speed, own = run["mtokens_per_s"], None if "workers" in name else run["mtokens_per_cpu_s"]
            first = run.get("first_batch_s")
            shares = ("", "") if own is None else (f"{own:.1f}", f"{own / ceiling:.2f}")
            table.add_row(kind, name, f"{speed:.1f}", *shares, "" if first is None else f"{first:.2f}")
    console, grown = Console(), figures["memory"]
    console.print(table)
    console.print("goals in one process: long 100, chat 50 Mtoken/s, first batch 1 s. A token is 24 bytes.")
    sizes = (grown["after_1000"] / 1e6, grown["after_10000"] / 1e6)
    console.print("own memory after 1,000 steps {:.0f} MB, after 10,000 {:.0f} MB".format(*sizes))
    for name, reason in figures["skipped"].items():
        console.print(f"{name}: skipped, {reason}")


def main() -> None:
    """Measure everything, or one part in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--part")
    parser.add_argument("--arguments", type=json.loads, default=[])
    options = parser.parse_args()
    if options.part:
        print(json.dumps(PARTS[options.part](*options.arguments)))
        return
    folder = options.out.resolve() / "streaming"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    figures = measure(folder)
    shutil.rmtree(folder)
    (options.out / "streaming.json").write_text(json.dumps(figures, indent=2) + "\n")
    show(figures)


if __name__ == "__main__":
    main()
