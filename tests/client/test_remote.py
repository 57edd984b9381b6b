"""Plans and shards through a real ``packhouse serve``: in ranges, and through its death and return in mid-epoch."""

import json
import os
import re
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from packhouse.client import Client, loader
from packhouse.client.dataset import PackedDataset
from packhouse.client.errors import Damaged, Mismatch
from packhouse.client.format import data_path, receipt_path
from packhouse.client.plan import PlanFile
from packhouse.client.remote import HttpSource
from packhouse.client.store import LocalStore
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.plans import build_plan

COMMAND = [sys.executable, "-c", "import sys; from packhouse.client.cli import main; sys.exit(main())", "serve"]


@contextmanager
def serving(home: Path, port: int) -> Iterator[str]:
    command = [*COMMAND, "--port", str(port), "--home", str(home)]
    with open(home / "log", "a") as log:
        environment = {**os.environ, "PACKHOUSE_CPUS": "1"}
        process = psutil.Popen(command, stdout=-1, stderr=log, text=True, env=environment)
    try:
        ready, _, _ = select.select([process.stdout], [], [], 60)
        found = re.search(r"http://\S+", process.stdout.readline()) if ready else None
        assert found, (home / "log").read_text()
        yield found[0]
    finally:
        for one in [process, *process.children(recursive=True)]:
            one.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.fixture
def plan(tmp_path: Path, write_dataset: Callable[..., str]) -> PlanFile:
    store = LocalStore(tmp_path / "home" / "store")
    dataset = write_dataset(store, [[100 + i % 800] * (1 + i % 40) for i in range(600)], rows_per_shard=20)
    spec = PlanSpec(datasets=[dataset], pack_length=64, strategy="internevo", seed=None)
    plan = PlanFile.open(store, build_plan(store, spec).id)
    for receipt in plan.header.datasets[0].shards:
        store.write(receipt_path(receipt.key), json.dumps(receipt.to_json()).encode())
    return plan


def listed(batches: Any) -> list[Any]:
    return [(data["step"], data["input_ids"].tolist(), labels.tolist()) for data, labels in batches]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_restart_of_the_service_in_mid_epoch_is_survived(plan: PlanFile, tmp_path: Path) -> None:
    home, cache = tmp_path / "home", tmp_path / "cache"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = threading.Event()
    with Client(f"http://127.0.0.1:{port}") as client:
        first = serving(home, port)
        first.__enter__()
        key = data_path(plan.header.datasets[0].shards[0].key)
        whole = bytes(plan.store.open(key))
        with HttpSource(client.connection).piece(key, 100) as piece:
            assert (piece.start, piece.total, b"".join(piece.chunks)) == (100, len(whole), whole[100:])
        with HttpSource(client.connection).piece(key, len(whole)) as piece:
            assert (piece.total, piece.digest) == (0, "")  # nothing is left to send: begin again
        budget = 4 * max(shard.data.bytes for shard in plan.header.datasets[0].shards)
        remote = PackedDataset(client.open_plan(plan.id), client.open_store(cache, budget))
        batches = loader(remote, workers=2, prefetch_bytes=4 * 64 * 24, timeout=100)
        seen, iterator = [], iter(batches)
        seen += [next(iterator) for _ in range(5)]
        first.__exit__(None, None, None)

        def restart() -> None:
            with serving(home, port):
                done.wait(100)

        again = threading.Thread(target=restart)
        again.start()
        try:
            seen += iterator
        finally:
            done.set()
            again.join()
    assert listed(seen) == listed(PackedDataset(plan, plan.store))
    kept = [path.stat().st_size for path in (cache / "shards").rglob("*.arrow")]
    assert sum(kept) <= budget


def test_a_refusal_names_the_difference_through_the_service_too(service: Any, cached: Any) -> None:
    with Client(service.url) as client:
        ours, theirs = (
            client.plan(PlanSpec(datasets=[str(cached.dataset)], pack_length=length)).id for length in (128, 130)
        )
        dataset = PackedDataset(client.open_plan(ours), service.parts.store)
        with pytest.raises(Mismatch, match=r"they differ in pack_length \(130 there, 128 here\)"):
            dataset.load_state_dict({"plan": theirs, "step": 0})


def test_steps_that_come_short_are_an_error(plan: PlanFile) -> None:
    class Short:
        header = plan.header

        def slice(self, start: int, stop: int, rank: int, world: int) -> Any:
            return plan.slice(start, stop - 1, rank, world)

    with pytest.raises(Damaged, match="63 packs came for steps 0 to 64, and not 64"):
        list(PackedDataset(Short(), plan.store))
