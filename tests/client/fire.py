"""A run under fire: ranks stream a plan through a service and a shared cache, and their processes are killed.

``Run`` is one run of a seed, which says who is killed when, and in which world the run goes on. As a program
(``make soak``) it does one seed after the other and prints what was killed and what came of it.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from packhouse.client import Client, PackedDataset, loader
from packhouse.client.batches import TOKEN_BYTES
from packhouse.client.format import read_manifest, receipt_path
from packhouse.client.ledger import audit
from packhouse.client.plan import PlanFile
from packhouse.client.store import LocalStore
from packhouse.client.wire_plans import PlanSpec
from packhouse.service.server import listening
from packhouse.worker.executor import Executor
from packhouse.worker.plans import build_plan

VICTIMS = ("rank", "worker", "filler", "service")
PATIENCE = 60
"""Seconds without a step after which a run has hung."""
FORK = multiprocessing.get_context("fork")


Place = tuple[int, int, int]
"""A rank, the world, and the step it begins at."""


def serve(home: Path, port: int) -> None:
    """Be a service whose store has the plan: the real application on its real server, without a job to do."""
    from tests import conftest

    here: Any = conftest
    here.listening = lambda host, _: listening(host, port)
    with conftest._running(home, Executor(num_cpus=1)):
        signal.pause()


def be_rank(url: str, plan: str, cache: Path, budget: int, place: Place, log: Path, to: Connection) -> None:
    """Be one rank: tell the number of each step, and take the next when told to."""
    rank, world, start = place
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # the trace of an error that is wanted
    client = Client(url)
    dataset = PackedDataset(client.open_plan(plan), client.open_store(cache, budget), rank, world)
    two_steps = 2 * TOKEN_BYTES * dataset.packs_per_rank * dataset.plan.header.spec.pack_length
    batches = loader(dataset, workers=1, method="fork", prefetch_bytes=two_steps, log=log)
    batches.load_state_dict({"plan": plan, "step": start})
    for data, _ in batches:
        to.send(data["step"])
        to.recv()


@dataclass(frozen=True)
class Rank:
    process: Any
    pipe: Connection

    def step(self) -> int:
        """Return the next step that it has; raise ``EOFError`` where it has died."""
        limit = time.monotonic() + PATIENCE
        # Its pipe does not tell: a loader worker that outlives it for some seconds has that open too.
        while not self.pipe.poll(0.02):
            if self.process.exitcode is not None:
                raise EOFError
            assert time.monotonic() < limit, "the next step never came"
        return int(self.pipe.recv())

    def family(self) -> list[psutil.Process]:
        """Return the process and its loader workers, as far as they live."""
        try:
            own = psutil.Process(self.process.pid)
            return [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


@dataclass
class Run:
    """One run of ``plan``, whose store is ``home/store``, in ``folder``; ``kills`` processes are killed on its way."""

    home: Path
    folder: Path
    plan: PlanFile
    seed: int
    kills: int
    killed: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    checkpoint: int = 0
    """The step of the state that was saved last."""

    seen: list[psutil.Process] = field(default_factory=list)
    """Processes that may be left behind: what a killed rank started."""

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.cache = self.folder / "cache"
        sizes = [shard.data.bytes for dataset in self.plan.header.datasets for shard in dataset.shards]
        self.budget = max(sizes) + sum(sizes) // 4
        self.foreign = self._put_foreign_files()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.orders = [self.chance.choice(VICTIMS) for _ in range(self.kills)]

    def _put_foreign_files(self) -> dict[Path, bytes]:
        """Put files of somebody else into the cache: a shard of the plan, one of another, and a note."""
        key = self.plan.header.datasets[0].shards[0].key
        own = f"shards/{key[:2]}/{key}.arrow"
        files = {own: (self.home / "store" / own).read_bytes(), f"shards/zz/{'z' * 32}.arrow": b"z", "notes": b"mine"}
        for name, data in files.items():
            path = self.cache / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return {self.cache / name: data for name, data in files.items()}

    def finish(self) -> None:
        """Run to the plan's end through all kills."""
        self.service = self._start_service()
        try:
            while self.checkpoint < self.plan.steps:
                with self._ranks() as ranks, suppress(EOFError, ConnectionError):
                    self._train(ranks)
        finally:
            self.service.kill()
            self.service.join()
            end(self.seen)

    def _train(self, ranks: list[Rank]) -> None:
        """Let all ranks take steps together, as collectives make them, and strike somewhere among them."""
        start = self.checkpoint
        strike = start + self.chance.randrange(8)
        for step in range(start, self.plan.steps):
            if step >= strike and self.orders:
                self._strike(self.orders.pop(), ranks)
                strike = step + 1 + self.chance.randrange(8)
            for rank in ranks:
                assert rank.step() == step
            if self.chance.random() < 0.5 or step + 1 == self.plan.steps:
                self.checkpoint = step + 1
            for rank in ranks:
                rank.pipe.send("next")

    def _strike(self, victim: str, ranks: list[Rank]) -> None:
        time.sleep(self.chance.random() * 0.02)
        self.seen += [one for rank in ranks for one in rank.family()]
        if victim == "service":
            self.service.kill()
            self.service.join()
            time.sleep(self.chance.random() * 0.3)
            self.service = self._start_service()
        elif victim == "rank":
            self.chance.choice(ranks).process.kill()
        elif victim == "worker":
            workers = [one for rank in ranks for one in rank.family()[1:]]
            if not workers:
                return
            self.chance.choice(workers).kill()
        elif not self._kill_filler(ranks):
            return
        self.killed[victim] += 1

    def _kill_filler(self, ranks: list[Rank]) -> bool:
        """Kill a process in the middle of a transfer, which a service that stands still keeps it in."""
        os.kill(self.service.pid, signal.SIGSTOP)
        try:
            for rank in ranks:
                for _ in range(8):
                    rank.pipe.send("next")  # what was fetched ahead is used up, and somebody needs a further shard
            limit = time.monotonic() + 2
            while time.monotonic() < limit:
                for process in (one for rank in ranks for one in rank.family()):
                    with suppress(psutil.Error):
                        if any(file.path.endswith(".part") for file in process.open_files()):
                            process.kill()
                            return True
            return False
        finally:
            os.kill(self.service.pid, signal.SIGCONT)

    @contextmanager
    def _ranks(self) -> Iterator[list[Rank]]:
        """Start a world of some size; end all of it, whatever is left."""
        self.starts += 1
        assert self.starts <= 1 + self.killed.total(), f"seed {self.seed}: a world fell that nobody was killed in"
        ranks: list[Rank] = []
        world = self.chance.randint(1, 4)
        try:
            for rank in range(world):
                ours, theirs = FORK.Pipe()
                place, log = (rank, world, self.checkpoint), self.folder / f"{rank}.jsonl"
                url = f"http://127.0.0.1:{self.port}"
                given = url, self.plan.id, self.cache, self.budget, place, log, theirs
                ranks.append(Rank(FORK.Process(target=be_rank, args=given), ours))
                ranks[-1].process.start()
                theirs.close()
            yield ranks
        finally:
            end([process for one in ranks for process in one.family()])
            for one in ranks:
                one.process.join()
                one.pipe.close()

    def _start_service(self) -> Any:
        process = FORK.Process(target=serve, args=(self.home, self.port))
        process.start()
        return process

    def check(self) -> None:
        """Raise ``AssertionError`` unless each token was delivered exactly once and the cache is sane."""
        found = audit(self.plan, self.plan.store, sorted(self.folder.glob("*.jsonl")))
        assert found.exact, f"seed {self.seed}: {found}"
        assert found.tokens == self.plan.report.tokens
        assert {path: path.read_bytes() for path in self.foreign} == self.foreign, f"seed {self.seed}"
        fetched = [path for path in (self.cache / "shards").rglob("*") if path.is_file() and path not in self.foreign]
        for path in fetched:
            assert path.read_bytes() == (self.home / "store" / path.relative_to(self.cache)).read_bytes(), path
        assert sum(path.stat().st_size for path in fetched) <= self.budget, f"seed {self.seed}"


def end(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def make_plan(store: LocalStore) -> PlanFile:
    """Return a plan of some 60 steps over 60 shards, in their order."""
    from tests.conftest import _dataset

    dataset = _dataset(store, [[100 + i % 800] * (1 + i % 40) for i in range(1200)], rows_per_shard=20)
    for receipt in read_manifest(store, dataset).shards:
        store.write(receipt_path(receipt.key), json.dumps(receipt.to_json()).encode())
    spec = PlanSpec(datasets=[dataset], pack_length=64, micro_batches=6, strategy="internevo", seed=None)
    return PlanFile.open(store, build_plan(store, spec).id)


def main() -> None:
    """Run under fire until the time is over; leave with 1 at the first run that is not exact."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kills", type=int, default=12, help="in each run")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    killed: Counter[str] = Counter()
    runs = starts = tokens = 0
    end_at = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        plan = make_plan(LocalStore(home / "store"))
        for seed in count(options.seed):
            if time.monotonic() > end_at:
                break
            run = Run(home, Path(folder) / str(seed), plan, seed, options.kills)
            run.finish()
            run.check()
            killed += run.killed
            runs, starts, tokens = runs + 1, starts + run.starts, tokens + plan.report.tokens
            print(f"seed {seed}: exact after {run.killed.total()} kills and {run.starts} starts", file=sys.stderr)
    table = Table("killed", "times", title="Under fire")
    for victim in VICTIMS:
        table.add_row(victim, str(killed[victim]))
    Console().print(table)
    print(f"{runs} runs, {starts} starts, {tokens:,} tokens: each was delivered exactly once")


if __name__ == "__main__":
    main()
