"""Backup, restore and upgrade: while jobs run, from one kind of database to the other, and from older versions."""

import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from tests.service.test_catalog import OLD, job

from packhouse.client.api import Client
from packhouse.client.cli import main
from packhouse.client.digest import sealed
from packhouse.client.errors import Damaged, InvalidRequest, NotFound
from packhouse.client.format import read_manifest, receipt_path
from packhouse.client.receipt_file import ReceiptFile
from packhouse.client.store import LocalStore
from packhouse.client.wire import JobSpec, JobState
from packhouse.client.wire_plans import PlanSpec
from packhouse.service.backup import back_up, restore
from packhouse.service.catalog import Catalog
from packhouse.service.inventory import Inventory
from packhouse.service.migrations import SCHEMA_VERSION
from packhouse.service.store_format import KEY, OURS, check_format, read_format
from packhouse.service.tables import Table
from packhouse.service.tokens import Role, Tokens
from packhouse.worker.plans import build_plan
from packhouse.worker.verify import verify

WriteDataset = Callable[..., str]


Command = Callable[..., dict[str, Any]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function (words, home) that runs a command and returns what it prints."""

    def run(*words: str, home: Path) -> dict[str, Any]:
        assert main([*words, "--home", str(home), "--json"]) == 0, capsys.readouterr().err
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run


def in_a_process(*words: str) -> dict[str, Any]:
    python = [sys.executable, "-c", "import sys; from packhouse.client.cli import main; sys.exit(main())"]
    done = subprocess.run([*python, *words, "--json"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def filled(catalog: Catalog, store: LocalStore, write_dataset: WriteDataset) -> tuple[str, str]:
    """Fill a database and a store with some of everything; return the ids of a dataset and of a plan of it."""
    catalog.add(job(1), "k1")
    for number in range(4, 20):
        catalog.add(job(number, JobState.SUCCEEDED), f"k{number}")
    catalog.put({"ünï": bytes(range(256))})
    Tokens(catalog.engine).create("me", Role.ADMIN, None)
    dataset = write_dataset(store, [[number, 1] for number in range(20)])
    for receipt in read_manifest(store, dataset).shards:
        store.write(receipt_path(receipt.key), ReceiptFile(receipt).dump())
    inventory = Inventory(catalog.engine)
    inventory.add_dataset(store, dataset)
    plan = build_plan(store, PlanSpec(datasets=[dataset], pack_length=8))
    inventory.add_plan(plan.id, 1, [dataset])
    inventory.pin(dataset, True)
    return dataset, plan.id


def rows(catalog: Catalog) -> dict[str, Any]:
    tables = Table.metadata.sorted_tables
    with catalog.engine.connect() as connection:
        return {table.name: sorted(map(repr, connection.execute(table.select()))) for table in tables}


@pytest.mark.parametrize("to", ["sqlite", "postgresql"])
def test_each_database_takes_in_what_each_gave(
    database_url: str, to: str, tmp_path: Path, write_dataset: WriteDataset, request: pytest.FixtureRequest
) -> None:
    store, elsewhere = LocalStore(tmp_path / "store"), LocalStore(tmp_path / "elsewhere")
    url = f"sqlite:///{tmp_path}/b.db" if to == "sqlite" else request.getfixturevalue("postgres")()
    with closing(Catalog(database_url)) as catalog, closing(Catalog(url)) as empty:
        dataset, plan = filled(catalog, store, write_dataset)
        made = back_up(catalog.engine, store, tmp_path / "backup", shards=True)
        done = restore(empty.engine, elsewhere, tmp_path / "backup")
        assert rows(empty) == rows(catalog)
        assert (done.store.datasets, done.store.plans, done.store.lost) == (1, 1, 0)
        assert done.copied.files == made.copied.files
        assert Inventory(empty.engine).entry(dataset).pinned
        assert empty.add(job(3), "k3") is None  # its number is one that no other has
        assert [one.findings for one in verify(elsewhere) if one.findings] == []
        assert build_plan(elsewhere, PlanSpec(datasets=[dataset], pack_length=8)).id == plan


def test_a_backup_is_taken_while_jobs_run_and_restored_elsewhere(
    start_service: Any, tmp_path: Path, corpus: Path, texts: Path, tokenizer_dir: Path, command: Command
) -> None:
    (tmp_path / "a").mkdir()
    small = JobSpec(sources=[str(texts)], tokenizer=str(tokenizer_dir))
    large = JobSpec(sources=[str(corpus)], tokenizer=str(tokenizer_dir))
    with start_service(tmp_path / "a") as service, Client(service.url) as client:
        done = client.wait(client.submit(small).id)
        assert done.dataset is not None
        spec = PlanSpec(datasets=[done.dataset], pack_length=512)
        plan = client.plan(spec)
        client.cache.pin(plan.id)
        running = client.submit(large)
        while client.job(running.id).progress.phase != "encoding":
            time.sleep(0.01)
        saved = in_a_process("backup", str(tmp_path / "backup"), "--shards", "--home", str(tmp_path / "a"))
        assert saved["tables"]["jobs"]["rows"] == 2
        assert not client.job(running.id).state.final
        finished = client.wait(running.id)
        more = command("backup", str(tmp_path / "later"), home=tmp_path / "a")
        again = command("backup", str(tmp_path / "later"), home=tmp_path / "a")
        assert more["copied"]["kept"] == again["copied"]["files"] == 0 < again["copied"]["kept"]
    told = command("restore", str(tmp_path / "backup"), home=tmp_path / "b")
    assert told["store"]["lost"] == 0
    with start_service(tmp_path / "b") as service, Client(service.url) as client:
        assert client.wait(running.id).dataset == finished.dataset  # taken up again where it was
        warm = client.wait(client.submit(small).id)
        assert (warm.dataset, warm.progress.hits, warm.progress.misses) == (done.dataset, done.progress.blocks, {})
        assert client.plan(spec).id == plan.id
        assert [entry.id for entry in client.cache.entries() if entry.pinned] == [plan.id]


def test_without_shards_they_are_told_as_evicted(tmp_path: Path, write_dataset: WriteDataset) -> None:
    store, elsewhere = LocalStore(tmp_path / "store"), LocalStore(tmp_path / "elsewhere")
    with closing(Catalog(f"sqlite:///{tmp_path}/a.db")) as catalog:
        filled(catalog, store, write_dataset)
        back_up(catalog.engine, store, tmp_path / "backup", shards=False)
    with closing(Catalog(f"sqlite:///{tmp_path}/b.db")) as empty:
        done = restore(empty.engine, elsewhere, tmp_path / "backup")
        assert (done.store.shards, done.store.lost) == (0, 7)
        assert not list(elsewhere.list("shards"))
        with empty.engine.connect() as connection:
            assert set(connection.scalars(text("SELECT state FROM shards"))) == {"evicted"}


def test_a_damaged_shard_is_left_out_and_counted(tmp_path: Path, write_dataset: WriteDataset) -> None:
    store = LocalStore(tmp_path / "store")
    with closing(Catalog(f"sqlite:///{tmp_path}/a.db")) as catalog:
        filled(catalog, store, write_dataset)
        victim = next(key for key in store.list("shards") if key.endswith(".meta.arrow"))
        data = bytearray(store.open(victim))
        data[70] ^= 1
        store.write(victim, bytes(data))
        made = back_up(catalog.engine, store, tmp_path / "backup", shards=True)
    assert made.copied.damaged == 1
    kept = [key for key in LocalStore(tmp_path / "backup" / "store").list("shards") if key.endswith(".json")]
    assert len(kept) == 6


def test_a_backup_of_older_tables_is_brought_up_to_date(tmp_path: Path, command: Command) -> None:
    with closing(sqlite3.connect(tmp_path / "packhouse.db")) as connection:
        connection.executescript(OLD)
        row = (job(1).id, "k", "queued", False, job(1).model_dump_json())
        connection.execute("INSERT INTO jobs (id, key, state, cancelling, body) VALUES (?, ?, ?, ?, ?)", row)
        connection.commit()
    saved = command("backup", str(tmp_path / "backup"), home=tmp_path)
    assert saved["tables_version"] == 1
    assert command("upgrade", "--dry-run", home=tmp_path)["tables_found"] == 1
    command("restore", str(tmp_path / "backup"), home=tmp_path / "b")
    done = command("upgrade", home=tmp_path)
    assert (done["tables_found"], done["tables"], done["applied"]) == (1, SCHEMA_VERSION, True)
    for home in (tmp_path, tmp_path / "b"):
        assert command("upgrade", "--dry-run", home=home)["tables_found"] == SCHEMA_VERSION
        with closing(Catalog(f"sqlite:///{home}/packhouse.db")) as catalog:
            assert [one.id for one in catalog.jobs()] == [job(1).id]


def test_what_is_no_backup_or_no_place_for_one_is_refused(
    tmp_path: Path, write_dataset: WriteDataset, capsys: pytest.CaptureFixture[str]
) -> None:
    store = LocalStore(tmp_path / "store")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").touch()
    with closing(Catalog(f"sqlite:///{tmp_path}/packhouse.db")) as catalog:
        filled(catalog, store, write_dataset)
        with pytest.raises(InvalidRequest, match="'letter'"):
            back_up(catalog.engine, store, tmp_path / "mine", shards=False)
        made = back_up(catalog.engine, store, tmp_path / "backup", shards=False)
        with pytest.raises(InvalidRequest, match="has rows"):
            restore(catalog.engine, store, tmp_path / "backup")
    with closing(Catalog(f"sqlite:///{tmp_path}/b.db")) as empty:
        with pytest.raises(NotFound, match="no backup"):
            restore(empty.engine, store, tmp_path / "nothing")
        file = tmp_path / "backup" / "tables" / f"jobs-{made.tables['jobs'].digest}.arrow"
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(Damaged, match=file.name):
            restore(empty.engine, store, tmp_path / "backup")
        newer = made.model_copy(update={"tables_version": SCHEMA_VERSION + 1})
        (tmp_path / "backup" / "backup.json").write_bytes(sealed(newer.model_dump(mode="json")))
        with pytest.raises(InvalidRequest, match=f"version {SCHEMA_VERSION + 1}"):
            restore(empty.engine, store, tmp_path / "backup")
        assert not any(rows(empty).values())
    assert main(["backup", str(tmp_path / "b"), "--home", str(tmp_path / "nowhere")]) == 2
    assert "there is no database" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(("shift", "words"), [(1, "it is newer"), (-1, "'packhouse upgrade'")])
def test_a_store_of_another_format_is_not_guessed_at(
    tmp_path: Path, write_dataset: WriteDataset, shift: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = LocalStore(tmp_path / "store")
    dataset = write_dataset(store, [[1, 2]])
    check_format(store)
    assert read_format(store) == OURS
    Catalog(f"sqlite:///{tmp_path}/packhouse.db").close()
    store.delete(KEY)  # what was written before there was that file is known by its datasets
    manifest = json.loads(bytes(store.open(f"datasets/{dataset}.json")))
    store.write(f"datasets/{dataset}.json", json.dumps(manifest | {"format": OURS.shards + shift}).encode())
    with pytest.raises(InvalidRequest, match=words):
        check_format(store)
    assert main(["upgrade", "--home", str(tmp_path), "--json"]) == (2 if shift > 0 else 0)
    if shift < 0:
        assert json.loads(capsys.readouterr().out)["datasets_lost"] == 1
        check_format(store)
