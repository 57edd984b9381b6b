"""Crash truth: wherever a job dies or a store fails, nothing half-done is seen, and the next run ends as it should."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.s3_server import S3Server
from tests.worker.crash import (
    DATA,
    MANIFEST,
    META,
    RECEIPT,
    REJECTED,
    TOKENIZER,
    Jobs,
    Ran,
    digests,
    job_processes,
    run_job,
)

from packhouse.client import faults
from packhouse.client.errors import Unavailable
from packhouse.client.store import TEMPORARY, LocalStore, Store, store_at
from packhouse.client.wire import JobSpec
from packhouse.worker.verify import verify

POINTS = [faults.HALF_WRITTEN, faults.WRITTEN, faults.RENAMED]
FILES = {"tokenizer": TOKENIZER, "data": DATA, "meta": META, "rejected": REJECTED, "receipt": RECEIPT}
SOURCES, ROWS = 4, 100


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> JobSpec:
    """A job of four sources, each a block that is a task of its own, with a bad record."""
    folder = tmp_path_factory.mktemp("sources")
    for number in range(SOURCES):
        lines = [json.dumps({"text": f"source {number} row {row} " + "ab:/ " * row}) for row in range(ROWS)]
        (folder / f"{number}.jsonl").write_text("\n".join([*lines, "{bad"]))
    return JobSpec(sources=[str(folder)], tokenizer=str(tiny), max_bad_share=0.5)


@pytest.fixture(autouse=True)
def one_block_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packhouse.worker.encoding.TASK_BYTES", 1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, spec: JobSpec) -> tuple[Ran, dict[str, str]]:
    store = LocalStore(tmp_path_factory.mktemp("undisturbed"))
    return run_job(store, spec), digests(store)


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with job_processes() as running:
        yield running


def fault(folder: Path, point: str, key: str, action: str, **more: Any) -> Path:
    file = folder / "faults.json"
    file.write_text(json.dumps([{"point": point, "key": key, "action": action, **more}]))
    return file


def whole(store: Store) -> bool:
    """Whether everything that a reader can see in the store is right."""
    return not [one for one in verify(store) if one.findings]


def temporaries(store: LocalStore) -> list[str]:
    return [path.name for path in (store.root / TEMPORARY).glob("*")]


KILLS = [
    (point, name, FILES[name], 2 if name in ("data", "meta", "rejected", "receipt") else 0)
    for name in FILES
    for point in POINTS
]
KILLS += [(point, "manifest", MANIFEST, 0) for point in POINTS]


@pytest.mark.parametrize(
    ("point", "name", "key", "skip"), KILLS, ids=[f"{name}-{point}" for point, name, _, _ in KILLS]
)
def test_a_job_that_is_killed_ends_as_undisturbed_when_it_runs_again(
    tmp_path: Path,
    jobs: Jobs,
    spec: JobSpec,
    undisturbed: tuple[Ran, dict[str, str]],
    point: str,
    name: str,
    key: str,
    skip: int,
) -> None:
    store, (expected, files) = LocalStore(tmp_path / "store"), undisturbed
    code, _ = jobs.run(str(store.root), spec, fault(tmp_path, point, key, "kill", skip=skip))
    assert code == -9
    assert len(temporaries(store)) >= (point != faults.RENAMED)
    there = digests(store)
    assert there.items() <= files.items()
    assert whole(store)
    assert (f"datasets/{expected.dataset}.json" in there) == (name == "manifest" and point == faults.RENAMED)
    code, told = jobs.run(str(store.root), spec)
    hits = sum(path.endswith(".json") for path in there if path.startswith("shards/"))
    assert (code, told) == (0, {"dataset": expected.dataset, "rows": expected.rows, "hits": hits})
    assert hits >= (SOURCES if name == "manifest" else 0)
    assert digests(store) == files
    assert temporaries(store) == []
    assert whole(store)


@pytest.mark.parametrize(
    ("key", "point"),
    [(DATA, faults.RENAMED), (RECEIPT, faults.WRITTEN), (MANIFEST, faults.WRITTEN), (MANIFEST, faults.RENAMED)],
    ids=["data-renamed", "receipt-written", "manifest-written", "manifest-renamed"],
)
def test_a_job_that_is_killed_on_a_bucket_ends_as_undisturbed_when_it_runs_again(
    tmp_path: Path,
    jobs: Jobs,
    spec: JobSpec,
    undisturbed: tuple[Ran, dict[str, str]],
    s3_server: S3Server,
    point: str,
    key: str,
) -> None:
    uri, (expected, files) = s3_server.uri("crash", tmp_path.name), undisturbed
    store = store_at(uri)
    code, _ = jobs.run(uri, spec, fault(tmp_path, point, key, "kill"))
    assert code == -9
    there = digests(store)
    assert there.items() <= files.items()
    assert whole(store)
    code, told = jobs.run(uri, spec)
    hits = sum(path.endswith(".json") for path in there if path.startswith("shards/"))
    assert (code, told) == (0, {"dataset": expected.dataset, "rows": expected.rows, "hits": hits})
    assert digests(store) == files


@pytest.mark.parametrize(("point", "action"), [*zip(POINTS, ["ENOSPC", "EROFS", "EIO"], strict=True)])
@pytest.mark.parametrize("name", [*FILES, "manifest"])
def test_a_store_that_fails_fails_the_job_by_name(
    tmp_path: Path, spec: JobSpec, undisturbed: tuple[Ran, dict[str, str]], name: str, point: str, action: str
) -> None:
    store, (expected, files) = LocalStore(tmp_path / "store"), undisturbed
    faults.use(fault(tmp_path, point, (FILES | {"manifest": MANIFEST})[name], action))
    try:
        with pytest.raises(Unavailable, match=r"store cannot be written .*: \S+store: free or repair it"):
            run_job(store, spec)
    finally:
        faults.use(None)
    assert temporaries(store) == []
    assert digests(store).items() <= files.items()
    assert whole(store)
    again = run_job(store, spec)
    assert (again.dataset, again.rows) == (expected.dataset, expected.rows)
    assert digests(store) == files


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or shutil.which("mount") is None or subprocess.run(command, check=False).returncode:
        pytest.skip("only root can mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk(small_disk: Path, spec: JobSpec, undisturbed: tuple[Ran, dict[str, str]]) -> None:
    store, (expected, files) = LocalStore(small_disk), undisturbed
    ballast = small_disk / "ballast"

    def fill(ended: int) -> None:
        if ended == 3:  # the scan, and two blocks
            free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
            ballast.write_bytes(b"x" * (free - 8192))

    with pytest.raises(Unavailable, match="No space left on device"):
        run_job(store, spec, fill)
    assert list(store.list("datasets")) == []
    assert whole(store)
    assert temporaries(store) == []
    ballast.unlink()
    again = run_job(store, spec)
    assert (again.dataset, again.hits) == (expected.dataset, 2)
    assert digests(store) == files


def test_a_store_that_becomes_read_only(
    small_disk: Path, spec: JobSpec, undisturbed: tuple[Ran, dict[str, str]]
) -> None:
    store, (expected, files) = LocalStore(small_disk), undisturbed

    def protect(ended: int) -> None:
        if ended == 3:
            subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)

    with pytest.raises(Unavailable, match="Read-only file system"):
        run_job(store, spec, protect)
    with pytest.raises(Unavailable, match="Read-only file system"):
        store.check()
    assert whole(store)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    again = run_job(store, spec)
    assert (again.dataset, again.hits) == (expected.dataset, 2)
    assert digests(store) == files


@pytest.mark.parametrize("when", [3, SOURCES + 1])
def test_a_store_that_vanishes_in_mid_job(
    tmp_path: Path, spec: JobSpec, undisturbed: tuple[Ran, dict[str, str]], when: int
) -> None:
    """What is left where a mount was is an empty folder, into which the rest would be written."""
    store, (expected, files) = LocalStore(tmp_path / "store"), undisturbed

    def vanish(ended: int) -> None:
        if ended == when:
            store.root.rename(tmp_path / "elsewhere")

    with pytest.raises(Unavailable, match=r"are gone from the store"):
        run_job(store, spec, vanish)
    assert list(store.list("datasets")) == []
    assert whole(store)
    shutil.rmtree(store.root, ignore_errors=True)
    (tmp_path / "elsewhere").rename(store.root)
    again = run_job(store, spec)
    assert (again.dataset, again.hits) == (expected.dataset, min(when - 1, SOURCES))
    assert digests(store) == files


def test_faults_are_counted_over_processes(tmp_path: Path) -> None:
    file = fault(tmp_path, faults.WRITTEN, "a*", "ENOSPC", skip=1, times=2)
    processes = [faults.Faults(file), faults.Faults(file)]
    struck = []
    for number in range(5):
        try:
            processes[number % 2].point(faults.WRITTEN, "a/b")
        except OSError:
            struck.append(number)
    processes[0].point(faults.WRITTEN, "b")
    processes[0].point(faults.RENAMED, "a/b")
    assert struck == [1, 2]
