"""Streaming packed batches, measured: packhouse, a plain memory copy (the ceiling) and the peers that are installed.

Long documents, and short chats with a loss mask; ids of a 151,936-token vocabulary. All in one run on the same data,
each in a process of its own. Run it with ``make bench``.
"""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from parts import Figures, Part, PartFailed, apart, main
from rich.console import Console
from rich.table import Table
from stream_peers import LIMIT, rate

from packhouse.client.digest import digest_bytes, digest_json
from packhouse.client.format import (
    META_SCHEMA,
    FileInfo,
    Manifest,
    Receipt,
    data_path,
    manifest_path,
    meta_path,
    read_manifest,
    read_shard,
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
PEER_TOKENS = 4_000_000
PEERS_PYTHON = Path("build/peers/bin/python").absolute()
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


def packhouse(folder: str, plan_id: str, kernel: str, workers: int) -> Figures:
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
    return {"first_batch_s": first, "second_batch_s": second, **rate(data["input_ids"] for data, _ in batches)}


def copy() -> Figures:
    """Copy ids, labels and positions of a step from memory to memory, as fast as NumPy does."""
    size = PACK_LENGTH * PACKS
    source = np.ones((200, 3, size), np.int64)  # larger than any cache
    start, cpu, tokens = time.perf_counter(), time.process_time(), 0
    while (passed := time.perf_counter() - start) < LIMIT / 2:
        for step in source:
            tokens += step.copy().shape[1]
    return {"tokens": tokens, "seconds": passed, "cpu_s": time.process_time() - cpu}


def hf_datasets(folder: str, dataset_id: str) -> Figures:
    """Read samples by ``datasets`` in torch format, one by one, unpacked: what there is to build packs from."""
    import datasets

    manifest = read_manifest(LocalStore(folder), dataset_id)
    table = pa.ipc.open_file(f"{folder}/{data_path(manifest.shards[0].key)}").read_all().select(["input_ids"])
    path = f"{folder}/{dataset_id}.hf.arrow"
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    start = time.perf_counter()
    rows = iter(datasets.Dataset.from_file(path).with_format("torch"))
    next(rows)
    return {"first_batch_s": time.perf_counter() - start, **rate(row["input_ids"] for row in rows)}


def write_samples(folder: Path, dataset_id: str) -> str:
    """Write some million tokens as the peers' program reads them; return their name. Peers read them over and over."""
    store = LocalStore(folder)
    shard = read_shard(store, read_manifest(store, dataset_id).shards[0])
    last = min(int(np.searchsorted(shard.offsets, PEER_TOKENS)), len(shard.offsets) - 1)
    np.save(folder / f"{dataset_id}.ids.npy", shard.input_ids[: shard.offsets[last]].astype(np.uint32))
    np.save(folder / f"{dataset_id}.ends.npy", shard.offsets[1 : last + 1])
    return str(folder / dataset_id)


def memory(folder: str, plan_id: str) -> Figures:
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


PARTS: dict[str, Part] = {"packhouse": packhouse, "copy": copy, "datasets": hf_datasets, "memory": memory}
PEERS = {"litdata (no packs, views)": "litdata", "MosaicML streaming (no packs)": "mosaic"}


def speed(measured: Figures) -> Figures:
    """Add million tokens a second, by the clock and by CPU time."""
    seconds = {"mtokens_per_s": measured["seconds"], "mtokens_per_cpu_s": measured["cpu_s"]}
    return measured | {name: measured["tokens"] / value / 1e6 for name, value in seconds.items()}


def fastest(part: str, *arguments: Any) -> Figures:
    """Return the fastest of ``ROUNDS`` runs of a part."""
    runs = (speed(apart(part, *arguments)) for _ in range(ROUNDS))
    return max(runs, key=lambda run: float(run["mtokens_per_s"]))


def run_peers(samples: str) -> tuple[Figures, Figures]:
    """Return the figures of the peers, and of those that cannot be measured here the reason."""
    runs, skipped = Figures(), Figures()
    if not PEERS_PYTHON.exists():
        return runs, dict.fromkeys(PEERS, "make bench-peers has not been run")
    script = str(Path(__file__).with_name("stream_peers.py"))
    for name, part in PEERS.items():
        try:
            runs[name] = speed(apart(part, samples, PACK_LENGTH, script=script, python=str(PEERS_PYTHON)))
        except PartFailed as failure:
            skipped[name] = str(failure)
    return runs, skipped


def measure(folder: Path) -> Figures:
    """Run all parts and return their figures."""
    from packhouse.worker.plans import build_plan

    store, root = LocalStore(folder), str(folder)
    figures: Figures = {"cores": len(os.sched_getaffinity(0)), "tokens": TOKENS, "kinds": {}, "skipped": {}}
    for kind in KINDS:
        dataset = write_data(store, kind)
        spec = PlanSpec(datasets=[dataset], pack_length=PACK_LENGTH, micro_batches=PACKS, epochs=20)
        small = spec.model_copy(update={"micro_batches": 1, "pack_length": 1024})
        plan, tiny = build_plan(store, spec), build_plan(store, small)
        runs = {
            "memory copy (the ceiling)": fastest("copy"),
            "packhouse": fastest("packhouse", root, plan.id, "auto", 0),
            "packhouse, NumPy kernel": speed(apart("packhouse", root, plan.id, "numpy", 0)),
            "packhouse, two workers": speed(apart("packhouse", root, plan.id, "auto", 2)),
            "packhouse, small steps": speed(apart("packhouse", root, tiny.id, "auto", 0)),
            "packhouse, small steps, two workers": speed(apart("packhouse", root, tiny.id, "auto", 2)),
            "datasets, torch (no packs)": speed(apart("datasets", root, dataset)),
        }
        peers, skipped = run_peers(write_samples(folder, dataset))
        runs |= peers
        figures["skipped"] |= skipped
        figures["kinds"][kind] = {"padding": plan.report.padding, "runs": runs}
    once = small.model_copy(update={"epochs": 1})
    figures["memory"] = apart("memory", root, build_plan(store, once).id)
    return figures


def show(figures: Figures) -> None:
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


if __name__ == "__main__":
    main("streaming", PARTS, measure, show)
