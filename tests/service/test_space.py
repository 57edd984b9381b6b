"""Space on each database: what is evicted and in which order, what stays, and what happens when it is cut short."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import text
from tests.s3_server import S3Server

from packhouse.client.errors import Evicted, InvalidRequest, NotFound, Unavailable
from packhouse.client.format import data_path, meta_path, read_manifest, read_shard, receipt_path
from packhouse.client.receipt_file import ReceiptFile
from packhouse.client.store import LocalStore, Store, store_at
from packhouse.client.wire import Job, JobSpec, JobState, Progress
from packhouse.client.wire_cache import GcReport
from packhouse.client.wire_plans import PlanSpec
from packhouse.service.catalog import Catalog
from packhouse.service.inventory import Inventory
from packhouse.service.keep import Keep
from packhouse.service.leases import Signs
from packhouse.service.problems import Conflict
from packhouse.service.space import Space
from packhouse.worker.plans import build_plan
from packhouse.worker.shards import find_shard

NOTHING = Keep(recent=0, plans=0)
LEASE = 20.0

WriteDataset = Callable[..., str]


class Room:
    """A store with three datasets of two shards each, made 3, 2 and 1 days ago, and all that keeps its space."""

    def __init__(self, catalog: Catalog, store: Store, write_dataset: WriteDataset) -> None:
        self.catalog, self.store = catalog, store
        self.inventory = Inventory(catalog.engine, lease=LEASE)
        self._write = write_dataset
        self.datasets = [self.write([[number, at] for at in range(6)]) for number in (1, 2, 3)]
        for days, dataset in zip((3, 2, 1), self.datasets, strict=True):
            self.inventory.add_dataset(self.store, dataset)
            self.age(dataset, days)

    def space(self, keep: Keep = NOTHING, service: str = "a", store: Store | None = None) -> Space:
        signs = Signs(self.catalog.engine, service, service, LEASE)
        signs.enter()
        return Space(self.inventory, store or self.store, signs, keep=keep)

    def write(self, samples: list[list[int]]) -> str:
        """Write a dataset with the receipts of its shards."""
        dataset = self._write(self.store, samples)
        for receipt in read_manifest(self.store, dataset).shards:
            self.store.write(receipt_path(receipt.key), ReceiptFile(receipt).dump())
        return dataset

    def age(self, dataset: str, days: float) -> None:
        shards = (
            "UPDATE shards SET used_at = used_at - :s WHERE serial IN (SELECT shard FROM dataset_shards JOIN datasets"
            " ON datasets.serial = dataset WHERE id = :id)"
        )
        with self.catalog.engine.begin() as connection:
            for statement in (shards, "UPDATE datasets SET used_at = used_at - :s WHERE id = :id"):
                connection.execute(text(statement), {"s": days * 86400, "id": dataset})

    def keys(self, number: int) -> list[str]:
        return [receipt.key for receipt in self.manifests[self.datasets[number]].shards]

    def remember(self) -> "Room":
        self.manifests = {one: read_manifest(self.store, one) for one in self.datasets}
        self.bytes = {
            one: sum(r.data.bytes + r.meta.bytes for r in self.manifests[one].shards) for one in self.datasets
        }
        return self

    def whole(self) -> list[bool]:
        """Return which datasets have their manifest and all of their shards."""
        return [
            self.store.size(f"datasets/{one}.json") is not None
            and all(find_shard(self.store, receipt.key)[0] for receipt in self.manifests[one].shards)
            for one in self.datasets
        ]

    def job(self) -> None:
        """Let service 'a' begin a job."""
        spec = JobSpec(sources=["/a"], tokenizer="/t")
        now = datetime.now(UTC)
        job = Job(id="j", state=JobState.QUEUED, spec=spec, recipe="r", version=1, progress=Progress(), created_at=now)
        self.catalog.add(job, "k")
        assert self.catalog.take("a", LEASE)


@pytest.fixture
def room(database_url: str, tmp_path: Path, write_dataset: WriteDataset) -> Iterator[Room]:
    with closing(Catalog(database_url)) as catalog:
        yield Room(catalog, LocalStore(tmp_path / "store"), write_dataset).remember()


def last(steps: Iterator[GcReport]) -> GcReport:
    *_, report = steps
    assert report.done
    return report


def test_what_was_used_longest_ago_goes_first(room: Room) -> None:
    space, total = room.space(), sum(room.bytes.values())
    budget = total - room.bytes[room.datasets[0]] - 1
    foreseen = last(space.gc(budget, dry_run=True))
    assert room.whole() == [True, True, True]
    done = last(space.gc(budget))
    assert room.whole() == [False, False, True]
    assert (done.shards, done.datasets, done.bytes, done.over) == (3, 2, total, 0)
    assert done == foreseen.model_copy(update={"dry_run": False})
    assert space.usage().bytes == total - done.freed <= budget
    assert not any(room.store.size(path(key)) for path in (receipt_path, data_path, meta_path) for key in room.keys(0))
    for number in (0, 1):
        with pytest.raises(Evicted, match="was evicted on 20"):
            room.inventory.check_datasets([room.datasets[number]])
    assert last(space.gc(budget)).freed == 0


def test_a_use_moves_a_dataset_to_the_end(room: Room) -> None:
    space = room.space()
    space.used("datasets", room.datasets[0])
    last(space.gc(sum(room.bytes.values()) - 1))
    assert room.whole() == [True, False, True]


def test_a_shard_that_two_datasets_have_is_as_young_as_the_younger_one(room: Room) -> None:
    space = room.space()
    shared = [[1, at] for at in range(6)]  # those of dataset 0, and more
    larger = room.write([*shared, [9, 9]])
    room.inventory.add_dataset(room.store, larger)
    others = sum(room.bytes[one] for one in room.datasets[1:])
    last(space.gc(space.usage().bytes - others))
    assert room.whole() == [True, False, False]


def test_pins_live_plans_and_the_young_stay(room: Room) -> None:
    spec = PlanSpec(datasets=[room.datasets[1]], pack_length=8)
    plan = build_plan(room.store, spec)
    room.inventory.pin(room.datasets[0], True)
    space = room.space(Keep(recent=1.5 * 86400, plans=3600))
    space.plan_built(plan.id, spec.datasets)
    with room.catalog.engine.begin() as connection:
        connection.execute(text("UPDATE shards SET used_at = used_at - 9 * 86400"))
        connection.execute(
            text("UPDATE datasets SET used_at = used_at - 9 * 86400 WHERE id <> :id"), {"id": room.datasets[2]}
        )
    kept = last(space.gc(0))
    assert (room.whole(), kept.freed, kept.over > 0) == ([True, True, True], 0, True)

    with room.catalog.engine.begin() as connection:
        connection.execute(text("UPDATE plans SET used_at = used_at - 3601"))
    room.inventory.pin(room.datasets[0], False)
    gone = last(space.gc(0))
    assert (room.whole(), gone.datasets, gone.plans) == ([False, False, True], 2, 1)
    assert room.store.size(f"plans/{plan.id}.arrow") is None
    assert list(room.store.list("packs")) == []
    with pytest.raises(Evicted, match=r"plan .* was evicted"):
        room.inventory.check_plan(plan.id)
    with pytest.raises(Evicted):
        room.inventory.pin(room.datasets[0], True)


def test_a_pinned_plan_keeps_its_datasets(room: Room) -> None:
    spec = PlanSpec(datasets=[room.datasets[0]], pack_length=8)
    plan, space = build_plan(room.store, spec), room.space()
    space.plan_built(plan.id, spec.datasets)
    room.inventory.pin(plan.id, True)
    last(space.gc(0))
    assert room.whole() == [True, False, False]


def test_what_a_running_job_needs_stays(room: Room) -> None:
    space = room.space()
    room.job()
    room.inventory.need(room.keys(0))
    room.inventory.made({"f" * 32: 10}, "r")
    report = last(space.gc(0))
    assert room.whole() == [True, False, False]
    assert report.over == room.bytes[room.datasets[0]] + 10
    room.inventory.pin(room.datasets[0], True)
    with pytest.raises(Conflict, match="pinned"):
        next(space.remove(room.datasets[0]))
    room.inventory.pin(room.datasets[0], False)
    last(space.remove(room.datasets[0]))  # its name goes; what the job needs does not
    assert [find_shard(room.store, key)[1] for key in room.keys(0)] == ["", ""]


class CutShort(LocalStore):
    """A store that can remove ``left`` more files, and calls ``then`` before each."""

    left = 10**9
    then: Callable[[], None] = staticmethod(lambda: None)

    def delete(self, key: str) -> None:
        self.then()
        if not self.left:
            raise Unavailable("the store is gone")
        self.left -= 1
        super().delete(key)


@pytest.mark.parametrize("files", [0, 2, 4, 10, 17])
def test_eviction_that_is_cut_short_leaves_hits_or_misses_and_is_finished(room: Room, files: int) -> None:
    broken = CutShort(room.store.location)
    broken.left = files
    with pytest.raises(Unavailable, match="gone"):
        last(room.space(store=broken).gc(0))
    for number in range(3):
        for key in room.keys(number):
            receipt, why = find_shard(room.store, key)
            assert receipt is None or read_shard(room.store, receipt) is not None, why
    assert last(room.space().gc(0)).over == 0
    assert list(room.store.list("shards")) == list(room.store.list("datasets")) == []
    assert room.space().usage().bytes == 0


def test_a_job_waits_for_what_is_being_evicted_and_then_misses(room: Room) -> None:
    began, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        go_on.wait(10)

    slow = CutShort(room.store.location)
    slow.then = hold
    evicting = threading.Thread(target=lambda: last(room.space(store=slow).gc(0)))
    evicting.start()
    assert began.wait(10)
    room.job()
    waiting = threading.Thread(target=lambda: room.inventory.need(room.keys(0)))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    go_on.set()
    for thread in (waiting, evicting):
        thread.join(10)
        assert not thread.is_alive()
    assert [find_shard(room.store, key)[1] for key in room.keys(0)] == ["absent", "absent"]


def test_what_a_dead_service_was_evicting_is_free_for_a_job(room: Room) -> None:
    with room.catalog.engine.begin() as connection:
        connection.execute(text("UPDATE shards SET state = 'evicting'"))
        connection.execute(text("INSERT INTO locks VALUES ('cleaning', 'dead')"))
    space = room.space()
    room.job()
    begun = time.monotonic()
    room.inventory.need(room.keys(0))
    assert time.monotonic() - begun < 5
    last(space.gc(0))
    assert room.whole() == [True, False, False]


def test_one_cleans_at_a_time(room: Room) -> None:
    one, other = room.space(), room.space(service="b")
    steps = one.rescan()
    next(steps)
    for refused in (one.gc(0), other.gc(0), other.rescan(), other.remove(room.datasets[2])):
        with pytest.raises(Conflict, match="already"):
            next(iter(refused))
    assert next(other.gc(0, dry_run=True)).dry_run
    assert list(steps)[-1].done
    assert last(other.gc(0)).over == 0


def test_a_reader_with_a_map_goes_on_while_its_shard_is_evicted(room: Room) -> None:
    receipt = room.manifests[room.datasets[0]].shards[0]
    shard = read_shard(room.store, receipt)
    before = shard.input_ids.tolist()
    last(room.space().gc(0))
    assert shard.input_ids.tolist() == before
    with pytest.raises(NotFound):
        read_shard(room.store, receipt)


def test_a_removed_dataset_takes_only_what_is_its_own(room: Room) -> None:
    larger = room.write([*[[1, at] for at in range(6)], [9, 9]])
    room.inventory.add_dataset(room.store, larger)
    space = room.space()
    spec = PlanSpec(datasets=[larger], pack_length=8)
    plan = build_plan(room.store, spec)
    room.space(Keep()).plan_built(plan.id, spec.datasets)
    with pytest.raises(Conflict, match=plan.id):
        next(room.space(Keep()).remove(larger))
    last(room.space(Keep()).remove(plan.id))
    report = last(space.remove(larger))
    assert (report.shards, room.whole()) == (1, [True, True, True])
    with pytest.raises(Evicted):
        next(space.remove(larger))
    with pytest.raises(NotFound):
        next(space.remove("0" * 32))


def test_a_budget_is_kept_by_itself(room: Room) -> None:
    signs = Signs(room.catalog.engine, "a", "a", LEASE)
    signs.enter()
    space = Space(room.inventory, room.store, signs, budget=room.bytes[room.datasets[2]], keep=NOTHING, tick=0.05)
    space.start()
    end = time.monotonic() + 10
    while room.whole() != [False, False, True]:
        assert time.monotonic() < end
        time.sleep(0.05)
    space.stop()
    assert room.whole() == [False, False, True]


def test_what_was_evicted_long_ago_is_forgotten(room: Room) -> None:
    tables = ("dataset_shards", "shards", "datasets", "plan_datasets", "plans")

    def rows() -> list[int | None]:
        with room.catalog.engine.connect() as connection:
            return [connection.scalar(text(f"SELECT count(*) FROM {table}")) for table in tables]

    spec, space = PlanSpec(datasets=room.datasets[:1], pack_length=8), room.space()
    space.plan_built(build_plan(room.store, spec).id, spec.datasets)
    room.age(room.datasets[0], 40)
    last(space.gc(0))
    assert rows() == [0, 6, 3, 1, 1], "it is told of what went, however long ago it was used"
    room.write([[1, at] for at in range(6)])
    room.inventory.add_dataset(room.store, room.datasets[0])
    assert rows() == [2, 6, 3, 1, 1], "it is tied anew"
    with room.catalog.engine.begin() as connection:
        for statement in ("shards SET used_at = used_at", "datasets SET evicted_at = evicted_at"):
            connection.execute(text(f"UPDATE {statement} - 31 * 86400"))
        connection.execute(text("UPDATE plans SET evicted_at = evicted_at - 31 * 86400"))
    last(space.gc(10**9))
    assert rows() == [2, 2, 1, 0, 0]
    assert room.whole() == [True, False, False]
    with pytest.raises(NotFound):
        room.inventory.entry(room.datasets[1])


def test_a_service_that_starts_on_another_store_makes_the_catalog_that_stores(room: Room, tmp_path: Path) -> None:
    """What the old store held must not count against the new one's budget, and moving back loses nothing."""
    total = room.space().usage().bytes
    for store, held in ((LocalStore(tmp_path / "other"), 0), (room.store, total)):
        signs = Signs(room.catalog.engine, "a", "a", LEASE)
        signs.enter()
        space = Space(room.inventory, store, signs, budget=total, tick=0.05)
        space.start()
        end = time.monotonic() + 10
        while space.usage().bytes != held:
            assert time.monotonic() < end
            time.sleep(0.02)
        space.stop()
    assert room.whole() == [True, True, True]
    room.inventory.check_datasets(room.datasets)


def test_without_a_budget_one_must_be_named(room: Room) -> None:
    with pytest.raises(InvalidRequest, match="PACKHOUSE_STORE_BUDGET"):
        next(room.space().gc())


def test_a_lost_catalog_is_made_again_from_the_store(room: Room, tmp_path: Path, write_dataset: WriteDataset) -> None:
    spec = PlanSpec(datasets=room.datasets[:1], pack_length=8)
    plan = build_plan(room.store, spec)
    orphan = room.write([[7, 7]])
    room.store.delete(f"datasets/{orphan}.json")
    room.store.write(f"datasets/{'0' * 32}.json", b"{}")
    with closing(Catalog(f"sqlite:///{tmp_path}/new.db")) as catalog:
        again = Room.__new__(Room)
        again.catalog, again.store, again.inventory = catalog, room.store, Inventory(catalog.engine)
        space = again.space()
        *_, report = space.rescan()
        assert (report.datasets, report.plans, report.shards, report.found, report.lost) == (3, 1, 7, 1, 0)
        assert len(report.damaged) == 1
        assert {one.id for one in again.inventory.entries(None, 10)} == {*room.datasets, plan.id}
        usage = space.usage()
        stored = [key for key in room.store.list("shards") if key.endswith(".arrow")]
        assert usage.bytes == usage.plan_bytes + sum(room.store.size(key) or 0 for key in stored)

        room.store.delete(receipt_path(room.keys(1)[0]))
        room.store.delete(f"datasets/{room.datasets[2]}.json")
        *_, report = space.rescan()
        assert (report.found, report.lost, space.usage().shards) == (0, 1, 6)
        with pytest.raises(Evicted):
            again.inventory.check_datasets([room.datasets[2]])


def test_a_read_of_a_shard_is_a_use_of_its_datasets(room: Room) -> None:
    space = room.space()
    space.used("shards", room.keys(0)[1])
    last(space.gc(sum(room.bytes.values()) - 1))
    assert room.whole() == [True, False, True]


def test_what_no_dataset_has_goes_first(room: Room) -> None:
    room.inventory.made({"f" * 32: 1}, "r")
    last(room.space().gc(room.space().usage().bytes - 1))
    assert room.whole() == [True, True, True]
    with pytest.raises(Evicted, match="shard f"):
        room.inventory.check_shard("f" * 32)


def test_an_object_store_is_kept_small_and_scanned_too(
    s3_server: S3Server, tmp_path: Path, write_dataset: WriteDataset
) -> None:
    with closing(Catalog(f"sqlite:///{tmp_path}/db")) as catalog:
        room = Room(catalog, store_at(s3_server.uri("space")), write_dataset).remember()
        space = room.space()
        last(space.gc(sum(room.bytes.values()) - 1))
        assert room.whole() == [False, True, True]
        *_, report = space.rescan()
        assert (report.datasets, report.shards, report.lost) == (2, 5, 0)
