"""Kills at random, seeded: jobs over sources that change die at fault points and at random moments, then run again.

After every job that ends, its dataset is compared with that of the same job in a store where nothing was ever killed,
token by token, and the store is verified whole. ``make soak`` does 200 kills of jobs, and 20 of a service and its
workers, and prints what came of them.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tests.program import Program, gone, serving
from tests.worker.crash import DATA, MANIFEST, META, RECEIPT, REJECTED, TOKENIZER, Jobs, job_processes

from packhouse.client import faults
from packhouse.client.api import Client
from packhouse.client.format import read_manifest, read_shard
from packhouse.client.store import TEMPORARY, LocalStore
from packhouse.client.wire import JobSpec
from packhouse.worker.verify import verify

POINTS = [faults.HALF_WRITTEN, faults.WRITTEN, faults.RENAMED]
FILES = {"tokenizer": TOKENIZER, "data": DATA, "meta": META, "rejected": REJECTED, "receipt": RECEIPT}
FILES |= {"manifest": MANIFEST, "any file": "*"}
MOST_FILES = 6


@dataclass
class Summary:
    """What came of it."""

    seed: int
    kills: int = 0
    kills_by: dict[str, int] = field(default_factory=dict)
    jobs: int = 0
    survived: int = 0
    """Runs that ended before they were to be killed."""
    rows: int = 0
    lost: int = 0
    """Rows of the undisturbed dataset that are not there."""
    doubled: int = 0
    """Rows that are there more often than they should be."""
    wrong: int = 0
    """Rows that are another one than they should be, or elsewhere."""
    other_dataset: int = 0
    damaged: int = 0
    """Files that verify found damaged."""
    temporaries: int = 0
    """Temporary files that a job which ended had left."""
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        bad = self.lost, self.doubled, self.wrong, self.other_dataset, self.damaged, self.temporaries
        return not any(bad)


def soak(jobs: Jobs, folder: Path, tokenizer: Path, *, kills: int, seed: int, seconds: float) -> Summary:
    """Run jobs in ``folder`` until there were so many kills, or ``seconds`` are over."""
    chance, summary, began = random.Random(seed), Summary(seed), time.monotonic()
    sources, store = folder / "sources", LocalStore(folder / "store")
    sources.mkdir(parents=True)
    spec = JobSpec(sources=[str(sources)], tokenizer=str(tokenizer), max_bad_share=1.0)
    usual = 0.3
    while summary.kills < kills and time.monotonic() - began < seconds:
        _change(sources, chance)
        for _ in range(chance.choice([0, 1, 1, 2, 3])):
            how, faults_file, moment = _death(folder, chance, usual)
            code, told = jobs.run(str(store.root), spec, faults_file, moment)
            summary.kills += code == -9
            summary.kills_by[how] = summary.kills_by.get(how, 0) + (code == -9)
            summary.survived += code == 0
            if code not in (0, -9):
                raise AssertionError(f"seed {seed}, kill {summary.kills}: {how}: {told}")
        begun = time.monotonic()
        code, told = jobs.run(str(store.root), spec)
        usual = max(0.05, time.monotonic() - begun)
        if code:
            raise AssertionError(f"seed {seed}, after kill {summary.kills}: {told}")
        _compare(summary, jobs, store, spec, folder / "undisturbed", told["dataset"])
    summary.seconds = round(time.monotonic() - began, 1)
    return summary


def soak_service(jobs: Jobs, folder: Path, tokenizer: Path, *, kills: int, seed: int, seconds: float) -> Summary:
    """The same through the program: its service, or one of its Ray workers, is killed at a random moment."""
    chance, summary, began = random.Random(seed), Summary(seed), time.monotonic()
    sources, home = folder / "sources", folder / "home"
    sources.mkdir(parents=True)
    spec = JobSpec(sources=[str(sources)], tokenizer=str(tokenizer), max_bad_share=1.0)
    waiting: str | None = None
    while summary.kills < kills and time.monotonic() - began < seconds:
        with serving(home, PACKHOUSE_CPUS="2") as program, Client(program.url) as client:
            alive = True
            while alive and summary.kills < kills:
                if waiting is None:
                    _change(sources, chance)
                    waiting = client.submit(spec).id
                time.sleep(chance.uniform(0, 1.0))
                victims = _workers(program)
                alive = bool(victims) and chance.random() < 0.5
                (chance.choice(victims) if alive else program.process).kill()
                how = "a worker" if alive else "the service"
                summary.kills += 1
                summary.kills_by[how] = summary.kills_by.get(how, 0) + 1
                if alive:
                    dataset, waiting = client.wait(waiting).dataset or "", None
                    _compare(summary, jobs, LocalStore(home / "store"), spec, folder / "undisturbed", dataset)
            assert alive or gone(program, 10), program.left()
        if not alive:
            with serving(home) as program, Client(program.url) as client:
                dataset, waiting = client.wait(waiting or "").dataset or "", None
            _compare(summary, jobs, LocalStore(home / "store"), spec, folder / "undisturbed", dataset)
    summary.seconds = round(time.monotonic() - began, 1)
    return summary


def _workers(program: Program) -> list[psutil.Process]:
    """Return the Ray workers of a program; Ray's own agents are not among them, whose end is that of the whole node."""
    agents = "ray::Runtime", "ray::Dashboard"
    family = [(one, one.name()) for one in program.process.children(recursive=True)]
    return [one for one, name in family if name.startswith("ray::") and not name.startswith(agents)]


def _change(sources: Path, chance: random.Random) -> None:
    """Add a file, append to one, change a line, rename or remove one."""
    files = sorted(sources.iterdir())
    what = chance.choice(["add", "add", "append", "edit", "rename", "remove"]) if len(files) > 1 else "add"
    if what == "add" and len(files) >= MOST_FILES:
        what = "remove"
    if what == "add":
        name = f"{chance.randrange(10**9):09}.jsonl"
        (sources / name).write_text("".join(_record(chance) for _ in range(chance.randrange(1, 200))))
        return
    file = chance.choice(files)
    if what == "append":
        with open(file, "a") as out:
            out.writelines(_record(chance) for _ in range(chance.randrange(1, 20)))
    elif what == "edit":
        lines = file.read_text().splitlines(keepends=True)
        lines[chance.randrange(len(lines))] = _record(chance)
        file.write_text("".join(lines))
    elif what == "rename":
        file.rename(sources / f"{chance.randrange(10**9):09}.jsonl")
    else:
        file.unlink()


def _record(chance: random.Random) -> str:
    if chance.random() < 0.02:
        return "{bad\n"
    text = " ".join(f"{chance.randrange(10**6)}" for _ in range(chance.randrange(1, 60)))
    return json.dumps({"text": text}) + "\n"


def _death(folder: Path, chance: random.Random, usual: float) -> tuple[str, Path | None, float | None]:
    if chance.random() < 0.4:
        return "at a random moment", None, chance.uniform(0, usual)
    point, name = chance.choice(POINTS), chance.choice(sorted(FILES))
    fault = {"point": point, "key": FILES[name], "action": "kill", "skip": chance.randrange(2)}
    file = folder / "faults.json"
    shutil.rmtree(f"{file}.passes", ignore_errors=True)
    file.write_text(json.dumps([fault]))
    return f"{name} {point}", file, None


def _compare(summary: Summary, jobs: Jobs, store: LocalStore, spec: JobSpec, other: Path, dataset: str) -> None:
    shutil.rmtree(other, ignore_errors=True)
    code, told = jobs.run(str(other), spec)
    assert code == 0, told
    found, expected = _rows(store, dataset), _rows(LocalStore(other), told["dataset"])
    more, less = Counter(found), Counter(expected)
    summary.jobs += 1
    summary.rows += len(expected)
    summary.other_dataset += dataset != told["dataset"]
    summary.lost += (less - more).total()
    summary.doubled += sum(count for row, count in (more - less).items() if row in less)
    summary.wrong += sum(one != two for one, two in zip(found, expected, strict=False))
    summary.damaged += sum(len(one.findings) for one in verify(store))
    summary.temporaries += len(list((store.root / TEMPORARY).glob("*")))


def _rows(store: LocalStore, dataset: str) -> list[bytes]:
    """Return the ids of every row, in order."""
    rows = []
    for receipt in read_manifest(store, dataset).shards:
        shard = read_shard(store, receipt)
        pairs = zip(shard.offsets[:-1], shard.offsets[1:], strict=True)
        rows += [np.asarray(shard.input_ids[start:stop], np.uint32).tobytes() for start, stop in pairs]
    return rows


def main() -> int:
    """Run from the command line; the exit code is 0 when all is sound."""
    from packhouse.trainer.demo_data import sample_texts, train_tokenizer, write_corpus

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--service-kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1800.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, job_processes() as jobs:
        folder = Path(name)
        train_tokenizer(sample_texts(*write_corpus(folder)), folder / "tokenizer")
        options: dict[str, Any] = {"seed": asked.seed, "seconds": asked.seconds}
        jobs_alone = soak(jobs, folder / "jobs", folder / "tokenizer", kills=asked.kills, **options)
        print(json.dumps({"jobs alone": asdict(jobs_alone)}, indent=2), flush=True)
        served = soak_service(jobs, folder / "service", folder / "tokenizer", kills=asked.service_kills, **options)
        print(json.dumps({"through the service": asdict(served)}, indent=2))
    enough = jobs_alone.kills >= asked.kills and served.kills >= asked.service_kills
    return 0 if jobs_alone.sound and served.sound and enough else 1


if __name__ == "__main__":
    sys.exit(main())
