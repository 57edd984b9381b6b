"""Load on one service on loopback: trainers that pull steps and shards, and submitters; slow readers; a restart.

    python -m tests.load --trainers 200 --submitters 50 --seconds 60

It prints a table, or JSON, and ends with 1 where something was not as it must be: an error, a wrong byte, memory that
grows, files that stay open, a step that came twice or never, an end that took longer than is promised.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import xxhash
from tests.program import Program, gone, serving

from packhouse.client import Client, JobSpec, PlanSpec
from packhouse.trainer.demo_data import train_tokenizer

STOP_WITHIN = 20.0
"""Seconds that the service promises to end within."""
LONG_RECORD = 12_000_000
"""Characters of one record: its shard is larger than what the buffers between two sockets hold."""
SLOW, GONE = 40, 40
"""Readers that stop reading, and readers that go away in the middle."""
GROWTH = 0.10
"""How much larger the memory of the last third may be than that of the second."""


@dataclass
class Figures:
    """What was measured: seconds by kind of request, and what went wrong."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    faults: list[str] = field(default_factory=list)
    read: int = 0
    """Bytes."""
    retries: int = 0
    """Requests that found no service, and were sent again."""

    def rows(self) -> dict[str, dict[str, float]]:
        return {
            kind: {
                "count": len(values),
                "p50_ms": round(1000 * float(np.percentile(values, 50)), 1),
                "p99_ms": round(1000 * float(np.percentile(values, 99)), 1),
                "max_ms": round(1000 * max(values), 1),
            }
            for kind, values in sorted(self.seconds.items())
        }


@dataclass(frozen=True)
class Load:
    """What the service is asked for."""

    plan: str
    steps: int
    shards: list[str]
    large: str
    trainers: int
    submitters: int


def prepare(program: Program, folder: Path, trainers: int, submitters: int) -> Load:
    """Make a tokenizer, a corpus, a dataset and a plan."""
    random.seed(7)
    words = [f"{random.choice('bcdfghklmnprstvw')}{random.choice('aeiou')}{n % 997}" for n in range(4000)]
    lines = [json.dumps({"text": " ".join(random.choices(words, k=200))}) for _ in range(8000)]
    train_tokenizer(lines[:2000], folder / "tokenizer")
    lines.append(json.dumps({"text": " ".join(random.choices(words, k=LONG_RECORD // 5))}))
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    for number in range(submitters):
        (folder / f"small{number}.jsonl").write_text("\n".join(lines[number * 50 : number * 50 + 50]))
    with Client(program.url) as client:
        spec = JobSpec(sources=[str(folder / "corpus.jsonl")], tokenizer=str(folder / "tokenizer"))
        job = client.wait(client.submit(spec).id)
        assert job.dataset is not None
        plan = client.plan(PlanSpec(datasets=[job.dataset], pack_length=128, ranks=trainers, strategy="hard"))
        shards = sorted(client.open_plan(plan.id).header.datasets[0].shards, key=lambda shard: shard.data.bytes)
    return Load(plan.id, plan.report.steps, [one.key for one in shards[:-1]], shards[-1].key, trainers, submitters)


@asynccontextmanager
async def timed(figures: Figures, kind: str) -> AsyncIterator[None]:
    begun = time.monotonic()
    try:
        yield
    except (httpx.HTTPError, AssertionError) as error:
        figures.faults.append(f"{kind}: {type(error).__name__} {error}")
    else:
        figures.seconds[kind].append(time.monotonic() - begun)


def check(answer: httpx.Response) -> None:
    assert answer.status_code < 400, f"{answer.status_code} {answer.text[:200]}"
    if answer.status_code == 200 and (told := answer.headers.get("packhouse-digest")):
        assert xxhash.xxh3_128_hexdigest(answer.content) == told, "the body is not what its digest states"


async def train(client: httpx.AsyncClient, load: Load, rank: int, figures: Figures, end: float) -> None:
    """Pull one step after the other, and now and then a part of a shard."""
    step = rank  # not all at the same one
    while time.monotonic() < end:
        at = step % load.steps
        query: dict[str, Any] = {"start": at, "stop": at + 1, "rank": rank, "world": load.trainers, "header": "false"}
        async with timed(figures, "step"):
            answer = await client.get(f"/v1/plans/{load.plan}/steps", params=query)
            check(answer)
            figures.read += len(answer.content)
        if step % 5 == 0:
            key = load.shards[step % len(load.shards)]
            async with timed(figures, "shard, 256 kB of it"):
                answer = await client.get(f"/v1/shards/{key}", headers={"range": "bytes=0-262143"})
                check(answer)
                figures.read += len(answer.content)
        step += 1
        await asyncio.sleep(random.uniform(0.5, 1.5))  # a step's work


async def submit(client: httpx.AsyncClient, folder: Path, number: int, figures: Figures, end: float) -> None:
    """Submit small jobs, follow each to its end, and look around meanwhile."""
    turn = 0
    while time.monotonic() < end:
        # Each second job is new, the others find everything in the cache.
        body = {"sources": [str(folder / f"small{number}.jsonl")], "tokenizer": str(folder / "tokenizer")}
        async with timed(figures, "submit"):
            answer = await client.post("/v1/jobs", json=body | {"max_length": 1000 + turn // 2})
            check(answer)
        if answer.status_code in (200, 202):
            await follow(client, answer.json()["id"], figures, end)
        async with timed(figures, "list jobs"):
            check(await client.get("/v1/jobs", params={"limit": 20}))
        turn += 1
        await asyncio.sleep(random.uniform(0.2, 1))


async def follow(client: httpx.AsyncClient, job: str, figures: Figures, end: float) -> None:
    state = "queued"
    async with timed(figures, "job, to its end"), client.stream("GET", f"/v1/jobs/{job}/events") as events:
        async for line in events.aiter_lines():
            if line.startswith("data: "):
                state = json.loads(line[6:])["state"]
            if time.monotonic() > end + 30:
                break
        assert state == "succeeded", f"job {job} is {state}"


async def run(program: Program, folder: Path, load: Load, figures: Figures, seconds: float) -> list[float]:
    """Let trainers and submitters work for ``seconds``; return the service's memory, in MB, twice a second."""
    memory: list[float] = []
    end = time.monotonic() + seconds
    async with client_of(program.url) as client:
        working = [
            *(train(client, load, rank, figures, end) for rank in range(load.trainers)),
            *(submit(client, folder, number, figures, end) for number in range(load.submitters)),
        ]
        watching = asyncio.create_task(watch(program.process, memory))
        await asyncio.gather(*working)
        watching.cancel()
    return memory


async def watch(process: psutil.Process, memory: list[float]) -> None:
    while True:
        memory.append(process.memory_info().rss / 1e6)
        await asyncio.sleep(0.5)


def client_of(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, limits=limits, timeout=60, trust_env=False)


async def hang_and_vanish(program: Program, load: Load, figures: Figures, seconds: float) -> None:
    """Read steps while some readers of a large shard read no further, and others go away in the middle of it."""
    async with client_of(program.url) as slow, client_of(program.url) as client:
        held = [slow.stream("GET", f"/v1/shards/{load.large}") for _ in range(SLOW)]
        pieces = [(await one.__aenter__()).aiter_bytes(1024) for one in held]
        for each in pieces:
            await anext(each)
        end = time.monotonic() + seconds
        trainers = [train(client, load, rank, figures, end) for rank in range(load.trainers // 2)]
        await asyncio.gather(*trainers, *(vanish(client, load.large) for _ in range(GONE)))


async def vanish(client: httpx.AsyncClient, key: str) -> None:
    await asyncio.sleep(random.random())
    async with client.stream("GET", f"/v1/shards/{key}") as answer:
        await anext(answer.aiter_bytes(1024))


async def resume(
    client: httpx.AsyncClient, url: list[str], load: Load, rank: int, steps: int, figures: Figures
) -> None:
    """Pull ``steps`` steps from where the service is now, through its end and its return."""
    came = 0
    while came < steps:
        query: dict[str, Any] = {"start": came, "stop": came + 1, "rank": rank, "world": load.trainers}
        try:
            answer = await client.get(f"{url[0]}/v1/plans/{load.plan}/steps", params=query | {"header": "false"})
            if answer.status_code == 503:
                raise httpx.ConnectError("it starts")
            check(answer)
            came += 1
        except httpx.HTTPError:
            figures.retries += 1
            await asyncio.sleep(random.uniform(1, 2))
        await asyncio.sleep(random.uniform(0.3, 0.7))


async def end_and_begin(program: Program, folder: Path, load: Load, figures: Figures, stack: ExitStack) -> float:
    """End the service by SIGTERM while trainers and streams read, and start it again; return the seconds it took."""
    url = [program.url]
    async with client_of("") as client:
        pulling = asyncio.gather(*(resume(client, url, load, rank, 10, figures) for rank in range(load.trainers)))
        await asyncio.sleep(1.5)
        begun = time.monotonic()
        program.process.send_signal(signal.SIGTERM)
        if not await asyncio.to_thread(gone, program, STOP_WITHIN + 10):
            figures.faults.append(f"{program.left()} still run")
        took = time.monotonic() - begun
        new = await asyncio.to_thread(stack.enter_context, serving(folder / "home", PACKHOUSE_CPUS="1"))
        url[0] = new.url
        await asyncio.wait_for(pulling, 120)
    return took


def restarted(program: Program, folder: Path, load: Load, figures: Figures) -> float:
    """Return how long the service took to end with streams open: of a shard, and of a job that runs."""
    body = {"sources": [str(folder / "corpus.jsonl")], "tokenizer": str(folder / "tokenizer"), "max_length": 77}
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=program.url, timeout=60, trust_env=False))
        job = client.post("/v1/jobs", json=body).json()["id"]
        for path in (f"/v1/shards/{load.large}", f"/v1/jobs/{job}/events"):
            next(stack.enter_context(client.stream("GET", path)).iter_raw(1024))
        return asyncio.run(end_and_begin(program, folder, load, figures, stack))


def measure(folder: Path, trainers: int, submitters: int, seconds: float) -> dict[str, Any]:
    figures, beside, resumed = Figures(), Figures(), Figures()
    with serving(folder / "home", PACKHOUSE_CPUS="1") as program:
        load = prepare(program, folder, trainers, submitters)
        asyncio.run(run(program, folder, load, Figures(), 3))  # what is opened once and stays
        files = program.process.num_fds()
        busy = sum(program.process.cpu_times()[:2])
        memory = asyncio.run(run(program, folder, load, figures, seconds))
        busy = sum(program.process.cpu_times()[:2]) - busy
        asyncio.run(hang_and_vanish(program, load, beside, min(10, seconds)))
        left = _settled(program.process, files)
        ended = restarted(program, folder, load, resumed)
    third = max(1, len(memory) // 3)
    thirds = [round(float(np.mean(memory[at * third : (at + 1) * third]))) for at in range(3)]
    faults = [*figures.faults, *beside.faults, *resumed.faults]
    if thirds[2] > thirds[1] * (1 + GROWTH):
        faults.append(f"the service's memory grows: {thirds} MB")
    if left > files + 5:
        faults.append(f"{left} files are open, and {files} were before")
    if not resumed.retries:
        faults.append("no trainer noticed the restart: nothing was tried")
    if ended > STOP_WITHIN:
        faults.append(f"it took {ended:.1f} s to end")
    return {
        "trainers": trainers,
        "submitters": submitters,
        "seconds": seconds,
        "requests": figures.rows(),
        "beside_slow_readers": beside.rows(),
        "cpu_ms_a_request": round(1000 * busy / max(1, sum(map(len, figures.seconds.values()))), 1),
        "mb_per_s": round(figures.read / 1e6 / seconds, 1),
        "memory_mb_by_thirds": thirds,
        "open_files": {"before": files, "after": left},
        "seconds_to_end": round(ended, 1),
        "retries_meanwhile": resumed.retries,
        "faults": faults[:20],
        "fault_count": len(faults),
    }


def _settled(process: psutil.Process, before: int) -> int:
    """Return the files that are open once connections are gone; ten seconds are enough for that."""
    end = time.monotonic() + 10
    while (left := process.num_fds()) > before and time.monotonic() < end:
        time.sleep(0.2)
    return int(left)


def show(found: dict[str, Any]) -> None:
    print(f"{found['trainers']} trainers, {found['submitters']} submitters, {found['seconds']:g} s")
    for title in ("requests", "beside_slow_readers"):
        print(f"\n{title.replace('_', ' '):24}{'count':>8}{'p50 ms':>10}{'p99 ms':>10}{'max ms':>10}")
        for kind, row in found[title].items():
            print(f"{kind:24}{row['count']:8,}{row['p50_ms']:10,.1f}{row['p99_ms']:10,.1f}{row['max_ms']:10,.1f}")
    print(f"\n{found['cpu_ms_a_request']} ms of the service's CPU a request; read {found['mb_per_s']} MB/s")
    print(f"memory by thirds {found['memory_mb_by_thirds']} MB; open files", end=" ")
    print(f"{found['open_files']}; ended within {found['seconds_to_end']} s; {found['fault_count']} faults")
    for fault in found["faults"]:
        print("FAULT", fault)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", type=int, default=200)
    parser.add_argument("--submitters", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="load") as folder:
        found = measure(Path(folder), given.trainers, given.submitters, given.seconds)
    if given.json:
        print(json.dumps(found))
    else:
        show(found)
    return 1 if found["fault_count"] else 0


if __name__ == "__main__":
    sys.exit(main())
