"""The node's cache: whole files or none, a budget for all processes, resumed transfers, nobody else's files removed."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from packhouse.client.dataset import PackedDataset
from packhouse.client.digest import digest_bytes
from packhouse.client.errors import Damaged, InvalidRequest, NotFound, Unavailable
from packhouse.client.format import data_path
from packhouse.client.plan import PlanFile
from packhouse.client.remote import FileSystemSource, object_store
from packhouse.client.shard_cache import Piece, ShardCache
from packhouse.client.store import LocalStore
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.plans import build_plan

Write = Callable[..., str]
FILES = {f"shards/ab/{name}.arrow": os.urandom(1000) for name in "abcdefgh"}
A, B, C, D = list(FILES)[:4]


@dataclass
class Scripted:
    """A source in memory: each fault of a script spoils one transfer."""

    files: dict[str, bytes] = field(default_factory=lambda: dict(FILES))
    faults: list[str] = field(default_factory=list)
    asked: list[tuple[str, int]] = field(default_factory=list)

    @contextmanager
    def piece(self, key: str, start: int) -> Iterator[Piece]:
        self.asked.append((key, start))
        fault = self.faults.pop(0) if self.faults else ""
        if key not in self.files:
            raise NotFound(f"no {key}")
        if fault == "away":
            raise Unavailable("the source is away")
        data = self.files[key]
        rest = data[start:] if fault != "altered" else bytes(len(data) - start)
        yield Piece(start, len(data), digest_bytes(data), self._chunks(rest, fault))

    def _chunks(self, rest: bytes, fault: str) -> Iterator[bytes]:
        yield rest[: len(rest) // 2]
        if fault == "cut":
            return
        if fault == "broken":
            raise Unavailable("the connection broke")
        yield rest[len(rest) // 2 :]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packhouse.client.retry.time.sleep", lambda seconds: None)


def in_folder(folder: Path) -> list[str]:
    return sorted(path.name[0] for path in (folder / "shards").rglob("*.arrow"))


def test_a_file_is_fetched_once(tmp_path: Path) -> None:
    source = Scripted()
    cache = ShardCache(source, tmp_path)
    assert bytes(cache.open(A)) == bytes(cache.open(A)) == bytes(ShardCache(source, tmp_path).open(A)) == FILES[A]
    assert source.asked == [(A, 0)]
    with pytest.raises(NotFound):
        cache.open("shards/ab/none.arrow")
    assert not list((tmp_path / "tmp").glob("*"))


@pytest.mark.parametrize("fault", ["cut", "broken"])
def test_a_transfer_that_ends_early_goes_on_where_it_was(tmp_path: Path, fault: str) -> None:
    source = Scripted(faults=["away", fault, fault])
    assert bytes(ShardCache(source, tmp_path).open(A)) == FILES[A]
    assert source.asked == [(A, 0), (A, 0), (A, 500), (A, 750)]


def test_what_arrives_altered_is_fetched_anew_and_never_kept(tmp_path: Path) -> None:
    source = Scripted(faults=["altered"])
    assert bytes(ShardCache(source, tmp_path).open(A)) == FILES[A]
    assert source.asked == [(A, 0), (A, 0)]
    with pytest.raises(Damaged, match="altered or cut on its way"):
        ShardCache(Scripted(faults=["altered"] * 4), tmp_path).open(B)
    assert in_folder(tmp_path) == ["a"]


def test_a_source_that_stays_away_is_an_error_in_time(tmp_path: Path) -> None:
    cache = ShardCache(Scripted(faults=["away"] * 10_000_000), tmp_path, patience=0.3)
    with pytest.raises(Unavailable, match=r"did not come in 0 s: the source is away"):
        cache.open(A)


def test_the_files_used_longest_ago_make_room(tmp_path: Path) -> None:
    cache = ShardCache(Scripted(), tmp_path, budget=3000)
    for number, key in enumerate([A, B, C, A, D]):
        held = cache.open(key)
        os.utime(tmp_path / key, ns=(number, (tmp_path / key).stat().st_mtime_ns))
    assert in_folder(tmp_path) == ["a", "c", "d"]
    assert bytes(held) == FILES[D]
    with pytest.raises(InvalidRequest, match="has 1,000 bytes and the cache may hold 999"):
        ShardCache(Scripted(), tmp_path / "small", budget=999).open(A)


def test_a_map_outlives_its_file(tmp_path: Path) -> None:
    cache = ShardCache(Scripted(), tmp_path, budget=1000)
    held = cache.open(A)
    cache.open(B)
    assert in_folder(tmp_path) == ["b"]
    assert bytes(held) == FILES[A]


def test_nobody_elses_file_is_removed(tmp_path: Path) -> None:
    theirs = tmp_path / B
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(FILES[B])
    cache = ShardCache(Scripted(), tmp_path, budget=1000)
    cache.open(A)
    (tmp_path / A).unlink()
    (tmp_path / A).write_bytes(FILES[A])  # somebody put a file of their own in its place
    cache.open(C)
    cache.open(D)
    assert in_folder(tmp_path) == ["a", "b", "d"]


def test_what_a_killed_process_had_begun_to_fetch_goes(tmp_path: Path) -> None:
    parts = tmp_path / "tmp"
    parts.mkdir()
    left, fetching, foreign = parts / f"{'0' * 32}.part", parts / f"{'1' * 32}.part", parts / "mine.part"
    for path in (left, fetching, foreign):
        path.write_bytes(b"half")
    for path in (left, foreign):
        os.utime(path, (0, 0))
    ShardCache(Scripted(), tmp_path).open(A)
    assert sorted(parts.iterdir()) == sorted([fetching, foreign])


def open_many(folder: Path, keys: list[str]) -> int:
    source = Scripted()
    cache = ShardCache(source, folder, budget=4000)
    for key in keys:
        assert bytes(cache.open(key)) == FILES[key]
    return len(source.asked)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_share_a_folder_and_its_budget(tmp_path: Path) -> None:
    keys = list(FILES)
    with multiprocessing.get_context("fork").Pool(4) as pool:
        turns = [keys[turn:] + keys[:turn] for turn in (0, 0, 3, 5)] * 3
        fetched = pool.starmap(open_many, [(tmp_path, turn) for turn in turns])
        assert len(in_folder(tmp_path)) <= 4
        assert sum(fetched) >= len(keys)
        small = pool.starmap(open_many, [(tmp_path / "one", keys[:4])] * 4)
    assert sum(small) == 4  # what one fetches the others wait for


def test_a_lock_that_is_never_freed_is_an_error(tmp_path: Path) -> None:
    cache = ShardCache(Scripted(), tmp_path, patience=0.05)
    with cache._locked("lock"), pytest.raises(Unavailable, match="waited 0 s for another process, which makes room"):
        cache.open(A)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_forked_meanwhile_does_not_keep_a_lock(tmp_path: Path) -> None:
    cache, end = ShardCache(Scripted(), tmp_path, patience=0.05), multiprocessing.get_context("fork").Event()
    with cache._locked("lock"):
        child = multiprocessing.get_context("fork").Process(target=end.wait, args=(60,))
        child.start()
    try:
        assert bytes(cache.open(A)) == FILES[A]
    finally:
        end.set()
        child.join()


def test_a_lock_is_waited_for_while_its_holder_gets_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, pauses = ShardCache(Scripted(), tmp_path, patience=0.5), [0.0]
    clock = SimpleNamespace(monotonic=lambda: 0.9 * len(pauses), sleep=pauses.append)
    monkeypatch.setattr("packhouse.client.shard_cache.time", clock)
    with cache._locked("lock"):
        for gets_on, waited in ((0, 2), (9, 11)):
            pauses[:] = []
            with pytest.raises(Unavailable, match="waited 1 s for mine"):
                cache._locked("lock", "mine", lambda: min(len(pauses), gets_on)).__enter__()  # noqa: B023
            assert len(pauses) == waited


def test_what_has_just_come_is_not_what_was_used_longest_ago(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    for key in (A, B, C):
        store.write(key, FILES[key])
    cache = object_store(f"file://{store.root}", tmp_path / "cache", budget=2000)
    part = tmp_path / "cache" / "tmp" / f"{digest_bytes(B.encode())}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(FILES[B][:10])
    os.utime(part, ns=(0, 0))  # its transfer began before A was used
    cache.open(A)
    for key in (B, C):
        cache._ensure(key)
    assert in_folder(tmp_path / "cache") == ["b", "c"]


def test_a_folder_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "locks").write_text("")
    with pytest.raises(Unavailable, match=r"cannot be written \(File exists\)"):
        ShardCache(Scripted(), tmp_path).open(A)


def test_a_list_that_is_damaged_costs_no_file(tmp_path: Path) -> None:
    cache = ShardCache(Scripted(), tmp_path, budget=1000)
    cache.open(A)
    (tmp_path / "fetched.json").write_text("[1")
    cache.open(B)
    cache.open(C)
    assert in_folder(tmp_path) == ["a", "c"]


def test_a_full_disk_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ShardCache(Scripted(), tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("packhouse.client.shard_cache.os.replace", full)
    with pytest.raises(Unavailable, match=r"cannot be written \(No space left on device\)"):
        cache.open(A)


@pytest.fixture
def plan(tmp_path: Path, write_dataset: Write) -> PlanFile:
    store = LocalStore(tmp_path / "store")
    dataset = write_dataset(store, [[100 + i] * (1 + i % 9) for i in range(40)], rows_per_shard=8)
    return PlanFile.open(store, build_plan(store, PlanSpec(datasets=[dataset], pack_length=16)).id)


def listed(dataset: PackedDataset) -> list[Any]:
    return [(data["step"], data["input_ids"].tolist()) for data, _ in dataset]


def test_an_object_store_is_read_through_the_cache(plan: PlanFile, tmp_path: Path) -> None:
    store = object_store(f"file://{tmp_path}/store", tmp_path / "cache")
    assert listed(PackedDataset(plan, store)) == listed(PackedDataset(plan, plan.store))
    assert len(list((tmp_path / "cache" / "shards").rglob("*.arrow"))) == 5
    with pytest.raises(NotFound, match="has no shards/zz"):
        store.open("shards/zz.arrow")


def test_a_full_disk_is_not_taken_for_a_store_that_is_away(plan: PlanFile, tmp_path: Path) -> None:
    source = FileSystemSource(f"file://{tmp_path}/store")
    with (
        pytest.raises(OSError, match="No space left"),
        source.piece(data_path(plan.header.datasets[0].shards[0].key), 0),
    ):
        raise OSError(28, "No space left on device")


def test_a_cache_smaller_than_the_data_serves_every_step(plan: PlanFile, tmp_path: Path) -> None:
    sizes = [shard.data.bytes for shard in plan.header.datasets[0].shards]
    store = object_store(f"file://{tmp_path}/store", tmp_path / "cache", budget=max(sizes) * 2)
    assert listed(PackedDataset(plan, store)) == listed(PackedDataset(plan, plan.store))
    left = [path.stat().st_size for path in (tmp_path / "cache" / "shards").rglob("*.arrow")]
    assert sum(left) <= max(sizes) * 2


def test_a_shard_that_was_built_again_is_fetched_again(plan: PlanFile, tmp_path: Path) -> None:
    store = object_store(f"file://{tmp_path}/store", tmp_path / "cache")
    key = data_path(plan.header.datasets[0].shards[0].key)
    path = tmp_path / "store" / key
    right = path.read_bytes()
    path.write_bytes(right[:-1] + b"x")
    store.open(key)
    path.write_bytes(right)
    assert listed(PackedDataset(plan, store)) == listed(PackedDataset(plan, plan.store))
