"""Verify: what is cut, altered, empty or missing is found, moved aside, and built again without another dataset."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.worker.crash import Ran, digests, run_job

from packhouse.client import PackedDataset, PlanSpec
from packhouse.client.errors import Damaged, Unavailable
from packhouse.client.format import data_path, manifest_path, meta_path, read_manifest, receipt_path, rejected_path
from packhouse.client.plan import PlanFile
from packhouse.client.store import LocalStore
from packhouse.client.wire import JobSpec
from packhouse.worker.plans import build_plan
from packhouse.worker.shards import find_shard
from packhouse.worker.verify import KEPT, QUARANTINE, Verified, verify, verify_shards

SOURCES = 4


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> JobSpec:
    folder = tmp_path_factory.mktemp("sources")
    for number in range(SOURCES):
        lines = [json.dumps({"text": f"{number} {row} " + "ab:/ " * row}) for row in range(30)]
        (folder / f"{number}.jsonl").write_text("\n".join([*lines, "{bad"]))
    return JobSpec(sources=[str(folder)], tokenizer=str(tiny), max_bad_share=0.5)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def ran(store: LocalStore, spec: JobSpec) -> Ran:
    return run_job(store, spec)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES: dict[str, Callable[[Path], None]] = {"cut": cut, "altered": flip, "empty": empty, "missing": Path.unlink}
FILES = {"data": data_path, "meta": meta_path, "rejected": rejected_path, "receipt": receipt_path}


def findings(steps: Iterator[Verified]) -> list[tuple[str, str, str | None]]:
    return [(found.file, found.fault, found.moved) for one in steps for found in one.findings]


def shards(store: LocalStore, dataset: str) -> list[str]:
    return sorted({shard.key for shard in read_manifest(store, dataset).shards})


def test_a_sound_store_is_read_whole_and_left_alone(store: LocalStore, ran: Ran) -> None:
    before = digests(store)
    spent: list[int] = []
    steps = list(verify(store, spend=spent.append))
    assert [step.id for step in steps] == [*shards(store, ran.dataset), ran.dataset]
    assert all(not step.findings and not step.unfinished for step in steps)
    names = [
        key
        for key in before
        if not key.startswith("tokenizers/") and (key.endswith((".arrow", ".jsonl")) or "datasets" in key)
    ]
    assert sum(step.bytes for step in steps) == sum(spent) == sum(store.size(name) or 0 for name in names)
    assert digests(store) == before


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_found_moved_aside_and_only_its_block_built_again(
    store: LocalStore, ran: Ran, spec: JobSpec, name: str, damage: str
) -> None:
    before, key = digests(store), shards(store, ran.dataset)[1]
    file = FILES[name](key)
    DAMAGES[damage](store.path(file))
    hurt = store.path(file).read_bytes() if damage != "missing" else None
    found = findings(verify(store))
    if (name, damage) == ("receipt", "missing"):
        assert found == []
        assert [step.id for step in verify(store) if step.unfinished] == [key]
    else:
        # How a receipt was damaged cannot be told: nothing states its length.
        fault = "altered" if (name, damage) == ("receipt", "cut") else damage
        assert [(where, what) for where, what, _ in found] == [(file, fault)]
        moved = found[0][2]
        assert hurt == (None if moved is None else bytes(store.open(moved)))
        assert (moved is None) == (damage == "missing")
    still = [] if name == "receipt" else [(file, "missing", None)]
    assert findings(verify(store)) == still
    assert find_shard(store, key)[0] is None
    again = run_job(store, spec)
    assert (again.dataset, again.rows, again.hits) == (ran.dataset, ran.rows, SOURCES - 1)
    assert digests(store) == before


def test_a_damaged_manifest_is_moved_aside_and_written_again(store: LocalStore, ran: Ran, spec: JobSpec) -> None:
    """Also where its id would still fit: the numbers of a shard are not part of it."""
    path = manifest_path(ran.dataset)
    whole = bytes(store.open(path))
    for altered in (whole.replace(b'"rows":30', b'"rows":31', 1), whole[:-1], b"", whole.replace(b"seal", b"sear")):
        assert altered != whole
        store.write(path, altered)
        with pytest.raises(Damaged, match="cannot be read"):
            read_manifest(store, ran.dataset)
        assert [(where, fault) for where, fault, _ in findings(verify(store))] == [
            (path, "altered" if altered else "empty")
        ]
        again = run_job(store, spec)
        assert (again.dataset, again.hits) == (ran.dataset, SOURCES)
        assert bytes(store.open(path)) == whole


def test_some_shards_alone(store: LocalStore, ran: Ran) -> None:
    keys = shards(store, ran.dataset)
    for key in keys[:2]:
        flip(store.path(data_path(key)))
    assert [where for where, _, _ in findings(verify_shards(store, [keys[0], keys[2]]))] == [data_path(keys[0])]
    assert [what for _, what, _ in findings(verify(store))] == ["missing", "altered"]


def test_it_goes_on_behind_a_shard(store: LocalStore, ran: Ran) -> None:
    keys = shards(store, ran.dataset)
    assert [step.id for step in verify(store, after=keys[1])] == [*keys[2:], ran.dataset]


def test_the_quarantine_is_bounded(store: LocalStore, ran: Ran) -> None:
    for number in range(KEPT + 5):
        store.write(f"{QUARANTINE}/{number:020}-old", b"x")
    flip(store.path(data_path(shards(store, ran.dataset)[0])))
    (moved,) = [moved for _, _, moved in findings(verify(store))]
    left = list(store.list(QUARANTINE))
    assert len(left) == KEPT
    assert moved == left[-1]


def test_what_is_built_again_while_it_reads_is_not_moved(store: LocalStore, ran: Ran, spec: JobSpec) -> None:
    key = shards(store, ran.dataset)[0]
    whole = bytes(store.open(data_path(key)))
    flip(store.path(data_path(key)))

    def heal(_: int) -> None:
        store.delete(receipt_path(key))
        store.write(data_path(key), whole)

    assert findings(verify_shards(store, [key])) != []
    flip(store.path(meta_path(key)))
    assert findings(verify_shards(store, [key], heal)) == []


def test_a_store_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "00").symlink_to("00")
    with pytest.raises(Unavailable, match=r"cannot be read .Too many levels"):
        list(verify(LocalStore(tmp_path)))


def test_a_reader_of_a_damaged_shard_fails_by_name_until_it_is_healed(
    store: LocalStore, ran: Ran, spec: JobSpec
) -> None:
    """On a mount: never fewer rows, and the same plan goes on when the shard is back."""
    plan = build_plan(store, PlanSpec(datasets=[ran.dataset], pack_length=512), write=True)

    def stream() -> list[list[int]]:
        packs = PackedDataset(PlanFile.open(store, plan.id), store, rank=0, world=1)
        return [data["input_ids"].flatten().tolist() for data, _ in packs]

    expected = stream()
    for key in shards(store, ran.dataset):
        flip(store.path(data_path(key)))
        with pytest.raises(Damaged, match=f"{data_path(key)} are not those.*packhouse cache verify"):
            stream()
        assert findings(verify_shards(store, [key])) != []
        assert run_job(store, spec).hits == SOURCES - 1
        assert stream() == expected
