"""Streams whose reader goes away, or whose service does: reports B093 and B094 of the list of cases."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
from tests.program import Program, gone, serving

from packhouse.client import Client
from packhouse.client.errors import Unavailable
from packhouse.client.format import data_path, read_manifest, receipt_path
from packhouse.client.plan import PlanFile
from packhouse.client.remote import HttpSource
from packhouse.client.store import LocalStore
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.plans import build_plan

STREAMS = 50
TOKENS = 4_000_000
"""Of the one shard: more bytes than the buffers between two sockets hold."""


@pytest.fixture
def plan(tmp_path: Path, write_dataset: Callable[..., str]) -> PlanFile:
    store = LocalStore(tmp_path / "store")
    dataset = write_dataset(store, [[7] * TOKENS], vocab_size=1 << 16)
    for receipt in read_manifest(store, dataset).shards:
        store.write(receipt_path(receipt.key), json.dumps(receipt.to_json()).encode())
    return PlanFile.open(store, build_plan(store, PlanSpec(datasets=[dataset], pack_length=16)).id)


def open_streams(url: str, paths: list[str], stack: ExitStack) -> list[Iterator[bytes]]:
    """Open many streams and read the first piece of each; return the rest, with which they would be closed."""
    client = stack.enter_context(httpx.Client(base_url=url, limits=httpx.Limits(max_connections=STREAMS)))
    rests = []
    for number in range(STREAMS):
        answer = stack.enter_context(client.stream("GET", paths[number % len(paths)], timeout=30))
        rests.append(answer.iter_bytes(1024))
        assert (answer.status_code, len(next(rests[-1]))) == (200, 1024)
    return rests


def busy(process: psutil.Process) -> float:
    """Return the share of a core that a process takes, over half a second."""
    before = sum(process.cpu_times()[:2])
    time.sleep(0.5)
    return float(sum(process.cpu_times()[:2]) - before) / 0.5


def read_through_the_end(program: Program, source: HttpSource, key: str) -> None:
    """Read the first piece of a file, let the service end, and read the rest."""
    with source.piece(key, 0) as piece:
        assert next(piece.chunks)
        program.process.terminate()
        assert gone(program, 20), program.left()
        assert not [*piece.chunks]


def test_b093_and_b094_streams_end_with_their_reader_and_with_their_service(tmp_path: Path, plan: PlanFile) -> None:
    receipt = max(plan.header.datasets[0].shards, key=lambda shard: shard.data.bytes)
    with serving(tmp_path) as program, Client(program.url) as client:
        paths = [f"/v1/shards/{receipt.key}", f"/v1/plans/{plan.id}/steps"]
        for path in paths:
            httpx.get(program.url + path, timeout=60)  # what is opened once and stays
        before = program.process.num_fds()
        with ExitStack() as stack:
            rests = open_streams(program.url, paths, stack)
            assert program.process.num_fds() >= before + len(rests) - 5
        limit = time.monotonic() + 10
        while program.process.num_fds() > before + 2 or busy(program.process) > 0.5:
            assert time.monotonic() < limit, (before, program.process.num_fds())

        with pytest.raises(Unavailable, match="broke"):  # and not an end that looks like that of the file
            read_through_the_end(program, HttpSource(client.connection), data_path(receipt.key))
