"""Incremental and warm jobs, measured: what a change of a source costs, and what nothing changed costs.

Every row is a job of its own on one cache, with the service's catalog beside it. *Encoded* is the share of the source
that was made anew, *work* the CPU time of the workers and of the job against those of the cold job (the peers do all of
it again, whatever changed). The ceiling of any job over a file that has changed is to read it once.
"""

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from caching import find_tokenizer
from corpus import write_corpus
from parts import Figures, apart, main
from rich.console import Console
from rich.table import Table

SIZE = 210_000_000
FILES = (100, 1_000, 10_000)


class Place:
    """A cache, and jobs on it."""

    def __init__(self, folder: Path, tokenizer: str) -> None:
        from packhouse.client.store import LocalStore
        from packhouse.service.catalog import Catalog
        from packhouse.worker.executor import Executor

        self.tokenizer = tokenizer
        self.store = LocalStore(folder / "store")
        self.catalog = Catalog(f"sqlite:///{folder}/catalog.db")
        self.executor = Executor()
        self.executor.start()

    def warm_up(self, source: Path) -> None:
        """Load engines before anything is measured."""
        from packhouse.worker import work

        _, recipe = self._resolved(source)
        for task in [self.executor.submit(work.warm_up, self.store, recipe.recipe_) for _ in range(self.executor.cpus)]:
            self.executor.result(task)

    def run(self, *sources: Path) -> Figures:
        """Do a job; return what it took."""
        from packhouse.worker import pipeline

        settle(*sources)
        told: list[Any] = []
        spec, recipe = self._resolved(*sources)
        cpu, start = self._cpu(), time.perf_counter()
        pipeline.run(
            spec,
            recipe,
            store=self.store,
            index=self.catalog,
            executor=self.executor,
            on_progress=told.append,
            cancelled=threading.Event(),
        )
        seconds, cpu = time.perf_counter() - start, self._cpu() - cpu
        last = told[-1]
        encoded = sum(miss.bytes for miss in last.why)
        counts = {"blocks": last.blocks, "misses": sum(last.misses.values()), "bytes_read": last.bytes_read}
        return {"seconds": seconds, "cpu": cpu, "bytes": last.bytes, "encoded": encoded, **counts}

    def _resolved(self, *sources: Path) -> Any:
        from packhouse.client.wire import JobSpec
        from packhouse.worker import recipe

        spec = JobSpec(sources=[str(source) for source in sources], tokenizer=self.tokenizer)
        return spec, recipe.resolve(spec, self.store, [{"text": ""}])

    def _cpu(self) -> float:
        """CPU seconds of this process and of the workers so far."""
        spent = psutil.Process().cpu_times()
        total = spent.user + spent.system
        for process in psutil.Process().children(recursive=True):
            if "ray::" in " ".join(process.cmdline()):
                times = process.cpu_times()
                total += times.user + times.system
        return float(total)

    def close(self) -> None:
        """End Ray."""
        self.executor.shutdown()
        self.catalog.close()


def settle(*sources: Path) -> None:
    """Wait until the sources are old enough to be remembered."""
    newest = max(path.stat().st_ctime_ns for path in sources)
    time.sleep(max(0.0, (newest + 150_000_000 - time.time_ns()) / 1e9))


def changes(folder: str, tokenizer: str) -> Figures:
    """Change a file in each way, and do its job again each time."""
    place, here = Place(Path(folder), tokenizer), Path(folder)
    path, other = here / "a.jsonl", here / "other.jsonl"
    write_corpus(path, SIZE, seed=0)
    write_corpus(other, 1_000_000, seed=7)
    place.warm_up(other)
    place.run(other)
    rows = {"cold": place.run(path), "nothing changed": place.run(path)}
    write_corpus(here / "more.jsonl", SIZE // 100, seed=1)
    with open(path, "ab") as file:
        file.write((here / "more.jsonl").read_bytes())
    rows["1 % appended"] = place.run(path)
    lines = path.read_bytes().splitlines(keepends=True)
    middle = len(lines) // 2
    path.write_bytes(b"".join([*lines[:middle], b'{"text": "a new line"}\n', *lines[middle:]]))
    rows["a line inserted in the middle"] = place.run(path)
    path.write_bytes(b"".join(lines[:middle] + lines[middle + 1 :]))
    rows["a line deleted in the middle"] = place.run(path)
    rows["renamed"] = place.run(path.rename(here / "renamed.jsonl"))
    shutil.copy(here / "renamed.jsonl", here / "copy.jsonl")
    rows["copied"] = place.run(here / "copy.jsonl")
    rows["in another dataset"] = place.run(other, here / "copy.jsonl")
    start = time.perf_counter()
    with open(here / "copy.jsonl", "rb", buffering=0) as file:
        while file.read(4 << 20):
            pass
    place.close()
    return {"rows": rows, "read_once": time.perf_counter() - start}


def warm(folder: str, tokenizer: str) -> Figures:
    """Do a job over many small files again and again, nothing changed."""
    place, rows = Place(Path(folder), tokenizer), {}
    for count in FILES:
        inside = Path(folder) / str(count)
        inside.mkdir()
        for index in range(count):
            lines = (json.dumps({"text": f"file {index} of {count}, line {line}"}) for line in range(5))
            (inside / f"{index:05}.jsonl").write_text("\n".join(lines))
        time.sleep(0.2)
        cold = place.run(inside)
        best = min((place.run(inside) for _ in range(3)), key=lambda row: row["seconds"])
        rows[str(count)] = best | {"cold_seconds": cold["seconds"]}
    place.close()
    return {"rows": rows}


PARTS = {"changes": changes, "warm": warm}


def measure(folder: Path) -> Figures:
    """Run both parts."""
    tokenizer = find_tokenizer(folder)
    figures: Figures = {"tokenizer": tokenizer, "cores": len(os.sched_getaffinity(0))}
    for name in PARTS:
        (folder / name).mkdir()
        figures[name] = apart(name, str(folder / name), tokenizer)
    return figures


def show(figures: Figures) -> None:
    """Print the figures as tables."""
    rows, cold = figures["changes"]["rows"], figures["changes"]["rows"]["cold"]
    table = Table("a job over one file", "s", "CPU s", "work", "encoded", "blocks made", "MB read", title="Changes")
    for name, row in rows.items():
        shares = (f"{row['cpu'] / cold['cpu']:.1%}", f"{row['encoded'] / row['bytes']:.2%}")
        made = f"{row['misses']} of {row['blocks']}"
        table.add_row(
            name, f"{row['seconds']:.2f}", f"{row['cpu']:.2f}", *shares, made, f"{row['bytes_read'] / 1e6:.1f}"
        )
    small = Table(
        "files", "s", "CPU s", "ms a file", "MB read", "s when cold", title="Many small files, nothing changed"
    )
    for count, row in figures["warm"]["rows"].items():
        each = f"{row['seconds'] / int(count) * 1e3:.3f}"
        read = f"{row['bytes_read'] / 1e6:.1f}"
        small.add_row(
            f"{int(count):,}", f"{row['seconds']:.3f}", f"{row['cpu']:.3f}", each, read, f"{row['cold_seconds']:.1f}"
        )
    console = Console()
    console.print(table)
    console.print(f"reading the file once: {figures['changes']['read_once']:.2f} s")
    appended = rows["1 % appended"]
    console.print(
        f"1 % appended: {appended['encoded'] / cold['encoded']:.2%} of the cold job's bytes encoded (goal 3 %), "
        f"{appended['seconds'] / cold['seconds']:.1%} of its time"
    )
    console.print(small)
    last = figures["warm"]["rows"][str(FILES[-1])]
    console.print(f"{last['seconds'] / FILES[-1] * 1e3:.3f} ms a file (goal 0.2)")


if __name__ == "__main__":
    main("incremental", PARTS, measure, show)
