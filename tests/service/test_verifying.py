"""The service over damaged files and over a bucket: found, named, healed; and the slow check in the background."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest
from tests.s3_server import S3Server

from packhouse.client import Client, JobSpec, PackedDataset, PlanSpec
from packhouse.client.cli_verify import verify, verify_steps
from packhouse.client.errors import Damaged, NotFound, Unavailable
from packhouse.client.format import Manifest, data_path, meta_path, read_manifest, receipt_path
from packhouse.client.plan import PlanFile
from packhouse.client.receipt_file import ReceiptFile
from packhouse.client.remote import object_store
from packhouse.client.s3_store import S3Store
from packhouse.client.store import LocalStore
from packhouse.client.wire import Job
from packhouse.client.wire_verify import VerifySpec
from packhouse.service import main
from packhouse.service.catalog import Catalog
from packhouse.service.settings import Settings
from packhouse.service.verifying import POSITION, BackgroundCheck, Pace, Stopped
from packhouse.worker import verify as worker_verify

Start = Callable[..., AbstractContextManager[Any]]


@pytest.fixture
def job(texts: Path, tokenizer_dir: Path) -> JobSpec:
    return JobSpec(sources=[str(texts)], tokenizer=str(tokenizer_dir))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def dataset_of(job: Job) -> str:
    assert job.dataset is not None
    return job.dataset


def stream(plan: Any, store: Any) -> list[list[int]]:
    return [data["input_ids"].flatten().tolist() for data, _ in PackedDataset(plan, store, rank=0, world=1)]


@pytest.mark.parametrize("file", [data_path, meta_path])
def test_a_damaged_shard_is_named_moved_aside_and_healed_by_the_next_job(
    start_service: Start, tmp_path: Path, job: JobSpec, file: Callable[[str], str]
) -> None:
    """A client of the service never gets fewer rows, or others; its plan goes on when the shard is back."""
    with start_service(tmp_path) as service, Client(service.url, timeout=60) as client:
        first = client.wait(client.submit(job).id)
        plan = client.plan(PlanSpec(datasets=[dataset_of(first)], pack_length=512))
        expected = stream(client.open_plan(plan.id), client.open_store(tmp_path / "cache"))
    store = LocalStore(tmp_path / "store")
    (shard,) = read_manifest(store, dataset_of(first)).shards
    flip(store.path(file(shard.key)))
    path = f"/v1/shards/{shard.key}" + ("/meta" if file is meta_path else "")
    with start_service(tmp_path) as service, Client(service.url, timeout=60) as client:
        with pytest.raises(Damaged, match=f"{file(shard.key)} are not those its receipt states .moved to quarantine/"):
            client.connection.send("GET", path)
        if file is data_path:
            with pytest.raises(Damaged, match=f"{data_path(shard.key)} is missing"):
                stream(client.open_plan(plan.id), client.open_store(tmp_path / "other"))
        healed = client.wait(client.submit(job).id)
        assert (healed.dataset, healed.progress.hits) == (first.dataset, 0)
        assert dict(healed.progress.misses) == {"damaged": 1}
        assert stream(client.open_plan(plan.id), client.open_store(tmp_path / "other")) == expected


def test_the_command_finds_what_is_damaged(
    service: Any, cached: Job, job: JobSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    store = service.parts.store
    (shard,) = read_manifest(store, dataset_of(cached)).shards
    flip(store.path(data_path(shard.key)))
    with pytest.raises(Damaged, match="1 stored files were damaged"):
        verify(as_json=True, url=service.url)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (found,) = [line["finding"] for line in lines if line["finding"]]
    assert (found["file"], found["fault"]) == (data_path(shard.key), "altered")
    assert found["moved"].startswith("quarantine/")
    assert lines[-1]["done"]
    assert (lines[-1]["damaged"], lines[-1]["share"]) == (1, 1.0)
    assert lines[-1]["shards"] >= 1
    with Client(service.url) as client:
        assert client.wait(client.submit(job).id).dataset == cached.dataset
    verify(shard=[shard.key], url=service.url)
    assert "verified 1 shards, 0 datasets" in capsys.readouterr().err
    with pytest.raises(NotFound, match=r"nothing under '../x'"):
        list(verify_steps(service.url, VerifySpec(shards=["../x"])))


def test_a_service_on_a_bucket(
    start_service: Start, s3_server: S3Server, tmp_path: Path, job: JobSpec, service: Any, cached: Job
) -> None:
    """Job, plan, and streams through the service and from the bucket; an object that is damaged there; and healing."""
    uri = s3_server.uri("store", "a/b")
    store, local = S3Store(uri), service.parts.store
    s3_server.fail(503, 3, method="PUT")
    with start_service(tmp_path, store=uri) as remote, Client(remote.url, timeout=60) as client:
        done = client.wait(client.submit(job).id)
        assert done.dataset == cached.dataset
        manifest, there = read_manifest(store, dataset_of(done)), read_manifest(local, dataset_of(done))
        assert manifest == there
        for key in (path(shard.key) for shard in manifest.shards for path in (data_path, meta_path)):
            assert bytes(store.open(key)) == bytes(local.open(key))
        assert client.wait(client.submit(job).id).progress.hits == len(manifest.shards)
        spec = PlanSpec(datasets=[dataset_of(done)], pack_length=512)
        plan = client.plan(spec)
        with Client(service.url) as other:
            assert other.plan(spec).id == plan.id
        expected = stream(PlanFile.open(local, plan.id), local)
        assert stream(client.open_plan(plan.id), client.open_store(tmp_path / "cache")) == expected
        assert stream(PlanFile.open(store, plan.id), object_store(uri, tmp_path / "node")) == expected
        assert [one.id for one in client.datasets()] == [done.dataset]
        assert [one.id for one in client.plans()] == [plan.id]
        assert len(list(client.rejected(done.id))) == 1
        key = data_path(manifest.shards[0].key)
        store.write(key, bytes(store.open(key))[:-5])
        *_, report = verify_steps(remote.url, VerifySpec())
        assert (report.damaged, report.done) == (1, True)
        assert client.wait(client.submit(job).id).progress.misses == {"damaged": 1}
        assert bytes(store.open(key)) == bytes(local.open(key))


def written(store: LocalStore, write_dataset: Callable[..., str], shards: int) -> Manifest:
    """Write a dataset whose shards have receipts."""
    manifest = read_manifest(store, write_dataset(store, [[number] * 9 for number in range(shards)], rows_per_shard=1))
    for shard in manifest.shards:
        store.write(receipt_path(shard.key), ReceiptFile(shard).dump())
    return manifest


def test_the_background_check_goes_on_where_it_was(
    tmp_path: Path, write_dataset: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path / "store")
    keys = sorted(shard.key for shard in written(store, write_dataset, 12).shards)
    flip(store.path(data_path(keys[-1])))
    seen: list[list[str]] = []
    whole = worker_verify.verify

    def watched(*given: Any, **options: Any) -> Any:
        seen.append([])
        for one in whole(*given, **options):
            seen[-1].append(one.id)
            yield one

    monkeypatch.setattr(worker_verify, "verify", watched)
    with closing(Catalog(f"sqlite:///{tmp_path}/db")) as catalog:
        first = BackgroundCheck(store, catalog, 0.02, save_every=0.0)  # some shards a second
        first.start()
        wait_until(lambda: len(seen) == 1 and len(seen[0]) >= 4)
        first.stop()
        position = catalog.get([POSITION])[POSITION].decode()
        assert position in seen[0]
        assert len(seen[0]) < 12
        second = BackgroundCheck(store, catalog, 1000.0, between=0.05)
        second.start()
        wait_until(lambda: len(seen) >= 4)
        second.stop()
        assert second.damaged >= 1
    assert seen[1] == [*keys[keys.index(position) + 1 :], *seen[1][-1:]]
    assert seen[2][:12] == keys
    assert store.size(data_path(keys[-1])) is None


def test_the_background_check_is_off_and_waits_its_turn(tmp_path: Path) -> None:
    with closing(Catalog(f"sqlite:///{tmp_path}/db")) as catalog:
        asked = threading.Event()

        def taken() -> bool:
            asked.set()
            return False

        idle = BackgroundCheck(LocalStore(tmp_path), catalog, 0.0)
        idle.start()
        other = BackgroundCheck(LocalStore(tmp_path), catalog, 1.0, lock=taken)
        other.start()
        assert asked.wait(5)
        for check in (idle, other):
            check.stop()
        assert catalog.get([POSITION]) == {}


def test_the_pace_is_kept() -> None:
    begun, pace = time.monotonic(), Pace(1e6, threading.Event())
    for _ in range(10):
        pace(20_000)
    assert 0.15 <= time.monotonic() - begun < 2
    stopping = threading.Event()
    stopping.set()
    with pytest.raises(Stopped):
        Pace(1.0, stopping)(1000)


def wait_until(true: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_store_that_cannot_be_written_keeps_the_service_from_starting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    settings = Settings.load(
        {"PACKHOUSE_HOME": str(tmp_path / "home"), "PACKHOUSE_STORE": str(tmp_path / "file")}, port=0
    )
    with pytest.raises(Unavailable, match=r"store cannot be written .*/file: set PACKHOUSE_STORE"):
        main.run(settings)
