"""Plans at scale, measured: from stored meta files to the committed plan and its report, each in a process of its own.

Seconds of CPU and the peak of memory come from the operating system (Linux); the bytes a sample are the peak less what
the process held with all modules and kernels loaded. Run it with ``python tests/benchmarks/plan_scale.py``; ``--rows``
names some of the cases, ``--samples`` another size.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from packing import documents
from rich.console import Console
from rich.table import Table

from packhouse.client.digest import digest_bytes, digest_json
from packhouse.client.format import META_SCHEMA, FileInfo, Manifest, Receipt, manifest_path, meta_path
from packhouse.client.store import LocalStore
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.plans import build_plan

ROWS_PER_SHARD = 1 << 20

FEW = {"pack_length": 32_768, "ranks": 8, "micro_batches": 4}
MANY = {"pack_length": 4096, "ranks": 8, "micro_batches": 4}
"""Packs of long samples are many, and what is held of each counts."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "best_fit": ("chats", FEW),
    "balanced, 8 × 4": ("chats", {**FEW, "strategy": "balanced"}),
    "balanced, 64 × 1": ("chats", {"pack_length": 32_768, "ranks": 64, "strategy": "balanced"}),
    "best_fit, web": ("web", FEW),
    "best_fit, web, 4k": ("web", MANY),
    "best_fit, web, 4k, length_grouped": ("web", {**MANY, "order": "length_grouped"}),
    "best_fit, web, 4k, 1.5 epochs": ("web", {**MANY, "dataset_epochs": [1.5]}),
    "balanced, web, 4k": ("web", {**MANY, "strategy": "balanced"}),
    "soft, web, 4k": ("web", {**MANY, "strategy": "soft"}),
    "hard, web, 4k": ("web", {**MANY, "strategy": "hard"}),
    "internevo, web, 4k": ("web", {**MANY, "strategy": "internevo", "seq_len": 2048}),
    "internevo_unpacked, web, 4k": ("web", {**MANY, "strategy": "internevo_unpacked"}),
    "none, web, 4k": ("web", {**MANY, "strategy": "none"}),
}


def write_meta(store: LocalStore, kind: str, count: int) -> str:
    """Write a dataset of ``count`` samples that has only its numbers; return its id."""
    receipts = []
    lengths = documents(kind, count, 32_768)
    for first in range(0, count, ROWS_PER_SHARD):
        n = lengths[first : first + ROWS_PER_SHARD]
        wide = n.astype(np.int64)
        columns = [n, wide * (wide + 1) // 2, n, n - 1, np.arange(len(n), dtype=np.int32)]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, META_SCHEMA) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays([pa.array(c) for c in columns], schema=META_SCHEMA))
        key, data, tokens = digest_json([kind, first, count]), sink.getvalue(), int(wide.sum())
        store.write(meta_path(key), data)
        info = FileInfo(data.size, digest_bytes(data))
        receipts.append(Receipt(key, len(n), tokens, tokens, int(columns[1].sum()), len(n), info, info))
    manifest = Manifest({"tokenizer": "drawn", "vocab_size": 1000}, 1000, tuple(receipts))
    store.write(manifest_path(manifest.id), manifest.dump())
    return manifest.id


def measure(folder: str, datasets: dict[str, str], name: str) -> dict[str, Any]:
    """Build a plan of the large dataset, after one of the small, in this process; return what it took."""
    store, fields = LocalStore(Path(folder)), CASES[name][1]
    build_plan(store, PlanSpec(datasets=[datasets["small"]], **fields))
    held = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    cpu, start = time.process_time(), time.perf_counter()
    report = build_plan(store, PlanSpec(datasets=[datasets["large"]], **fields)).report
    return {
        "samples": report.samples,
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "bytes_per_sample": (_peak() - held) / report.samples,
        "peak_gb": _peak() / 1e9,
        "fill": report.fill,
        "excess": report.excess,
    }


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def apart(*arguments: str) -> dict[str, Any]:
    """Return what ``measure`` returns in a process of its own."""
    command = [sys.executable, __file__, "--measure", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def show(results: dict[str, dict[str, Any]], console: Console) -> None:
    """Print the figures as a table."""
    table = Table("plan", "samples", "CPU s", "clock s", "µs/sample", "bytes/sample", "peak GB", "fill", "waiting")
    for name, one in results.items():
        micro = f"{one['cpu_seconds'] / one['samples'] * 1e6:.3f}"
        times = f"{one['cpu_seconds']:.2f}", f"{one['seconds']:.2f}", micro
        memory = f"{one['bytes_per_sample']:.1f}", f"{one['peak_gb']:.2f}"
        table.add_row(name, f"{one['samples']:,}", *times, *memory, f"{one['fill']:.4%}", f"{one['excess']:.3%}")
    console.print(table)


def main() -> None:
    """Measure the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--rows", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        folder, datasets, name = options.measure
        print(json.dumps(measure(folder, json.loads(datasets), name)))
        return
    results: dict[str, dict[str, Any]] = {}
    for kind in ("chats", "web"):
        names = [name for name in options.rows if CASES[name][0] == kind]
        with tempfile.TemporaryDirectory() as folder:
            sizes = {"small": 20_000, "large": options.samples} if names else {}
            datasets = {size: write_meta(LocalStore(Path(folder)), kind, count) for size, count in sizes.items()}
            results |= {name: apart(folder, json.dumps(datasets), name) for name in names}
    show(results, Console(width=140))
    options.out.mkdir(parents=True, exist_ok=True)
    body = {"cores": len(os.sched_getaffinity(0)), "samples": options.samples, **results}
    (options.out / "plan_scale.json").write_text(json.dumps(body, indent=2) + "\n")


if __name__ == "__main__":
    main()
