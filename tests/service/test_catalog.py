"""The catalog on each database: what it remembers, what it refuses, and who may save a job."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import MetaData, create_engine, inspect, text

from packhouse.client.errors import InvalidRequest, NotFound, Unavailable
from packhouse.client.wire import Job, JobSpec, JobState, Progress
from packhouse.service.catalog import Catalog, RejectedBlock
from packhouse.service.leases import Signs
from packhouse.service.migrations import SCHEMA_VERSION
from packhouse.service.tables import Table

LEASE = 30.0


@pytest.fixture
def catalog(database_url: str) -> Iterator[Catalog]:
    with closing(Catalog(database_url)) as opened:
        yield opened


def job(number: int, state: JobState = JobState.QUEUED) -> Job:
    spec = JobSpec(sources=["/a"], tokenizer="/t")
    now = datetime.now(UTC)
    return Job(id=f"{number:016x}", state=state, spec=spec, recipe="r", version=1, progress=Progress(), created_at=now)


def test_it_remembers_after_it_is_closed(database_url: str) -> None:
    with closing(Catalog(database_url)) as catalog:
        assert catalog.add(job(1), "k1") is None
        catalog.put({"a": b"1", "b": b"2"})
        catalog.put({"b": b"3"})
    with closing(Catalog(database_url)) as catalog:
        assert catalog.job(job(1).id).spec == job(1).spec
        assert catalog.get(["a", "b", "c"]) == {"a": b"1", "b": b"3"}


def test_one_active_job_a_key(catalog: Catalog) -> None:
    catalog.add(job(1), "k")
    twin = catalog.add(job(2), "k")
    assert twin is not None
    assert twin.id == job(1).id
    catalog.cancel(job(1).id)
    assert catalog.add(job(2), "k") is None


def test_jobs_are_listed_newest_first_in_pages(catalog: Catalog) -> None:
    for number in range(5):
        catalog.add(job(number), f"k{number}")
    catalog.cancel(job(3).id)
    first = catalog.jobs(limit=2)
    assert [one.id for one in first] == [job(4).id, job(3).id]
    assert [one.id for one in catalog.jobs(before=first[-1].id)] == [job(2).id, job(1).id, job(0).id]
    assert [one.id for one in catalog.jobs(state=JobState.CANCELLED)] == [job(3).id]


def test_jobs_are_taken_in_the_order_they_came_and_once(catalog: Catalog) -> None:
    Signs(catalog.engine, "a", "a", LEASE).enter()
    for number in range(3):
        catalog.add(job(number), f"k{number}")
    taken = [catalog.take("a", LEASE) for _ in range(4)]
    assert [one and one[0].id for one in taken] == [job(0).id, job(1).id, job(2).id, None]
    assert {one[0].state for one in taken if one} == {JobState.RUNNING}


def test_many_services_take_each_job_once(catalog: Catalog) -> None:
    for number in range(24):
        catalog.add(job(number), f"k{number}")
    taken: list[str] = []

    def take(service: str) -> None:
        Signs(catalog.engine, service, service, LEASE).enter()
        while (one := catalog.take(service, LEASE)) is not None:
            taken.append(one[0].id)

    threads = [threading.Thread(target=take, args=(f"service {number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == [job(number).id for number in range(24)]


@pytest.mark.parametrize("ago", [31, -3600], ids=["unseen", "the clock was set back"])
def test_a_dead_service_loses_its_jobs_and_what_it_saves_is_refused(catalog: Catalog, ago: int) -> None:
    Signs(catalog.engine, "a", "a", LEASE).enter()
    Signs(catalog.engine, "b", "b", LEASE).enter()
    catalog.add(job(1), "k")
    first, lease, _ = catalog.take("a", LEASE) or pytest.fail("there is a job")
    assert catalog.take("b", LEASE) is None
    assert catalog.save(first.model_copy(update={"version": 7}), lease)
    with catalog.engine.begin() as connection:
        connection.execute(text("UPDATE services SET seen_at = seen_at - :ago WHERE id = 'a'"), {"ago": ago})
    assert catalog.take("a", LEASE) is None  # it goes on with what it has
    second, new, cancelling = catalog.take("b", LEASE) or pytest.fail("its owner is dead")
    assert (second.version > 7 + 1000, second.progress, cancelling) == (True, Progress(), False)
    Signs(catalog.engine, "a", "a", LEASE).beat()
    late = first.model_copy(update={"state": JobState.SUCCEEDED, "dataset": "wrong"})
    assert not catalog.save(late, lease)
    assert catalog.job(first.id) == second
    assert catalog.save(second.model_copy(update={"state": JobState.SUCCEEDED}), new)
    assert not catalog.save(second, new)  # nobody owns a job that has ended


def test_a_service_that_starts_again_is_not_waited_for(catalog: Catalog) -> None:
    Signs(catalog.engine, "a", "host:/home", LEASE).enter()
    catalog.add(job(1), "k")
    assert catalog.take("a", LEASE)
    Signs(catalog.engine, "b", "host:/home", LEASE).enter()
    assert catalog.take("b", LEASE)


def test_a_job_is_cancelled_whoever_runs_it(catalog: Catalog) -> None:
    signs = Signs(catalog.engine, "a", "a", LEASE)
    signs.enter()
    for number in (1, 2):
        catalog.add(job(number), f"k{number}")
    assert catalog.take("a", LEASE)
    waiting, running = catalog.cancel(job(2).id), catalog.cancel(job(1).id)
    assert waiting is not None
    assert running is not None
    assert (waiting.state, running.state) == (JobState.CANCELLED, JobState.RUNNING)
    assert signs.standing() == {job(1).id: (1, True)}
    assert catalog.cancel(job(2).id) is None
    signs.leave()
    assert (catalog.take("b", LEASE) or pytest.fail("its owner has left"))[2]


def test_a_lock_is_held_by_one_service_that_lives(catalog: Catalog) -> None:
    one, other = (Signs(catalog.engine, name, name, LEASE) for name in "ab")
    one.enter()
    other.enter()
    assert one.lock("gc")
    assert not one.lock("gc")
    assert not other.lock("gc")
    one.unlock("gc")
    assert other.lock("gc")
    other.leave()
    assert one.lock("gc")


def test_many_keys_at_once(catalog: Catalog) -> None:
    items = {f"key {number}": str(number).encode() for number in range(20_000)}
    catalog.put(items)
    assert catalog.get(list(items)) == items


def test_rejected_blocks_keep_their_order(catalog: Catalog) -> None:
    blocks = [RejectedBlock(f"/{n}", 5_000_000_000 + n, n, "s", 1) for n in range(12)]
    catalog.add(job(1), "k")
    catalog.keep_rejected(job(1).id, blocks)
    catalog.keep_rejected(job(1).id, blocks)
    assert list(catalog.rejected(job(1).id)) == blocks


def test_unknown_job(catalog: Catalog) -> None:
    with pytest.raises(NotFound, match="no job 'x'"):
        catalog.job("x")


def test_the_tables_are_those_that_the_program_names(catalog: Catalog) -> None:
    """Migrations and models say the same of each column, on each database."""
    found = MetaData()
    found.reflect(catalog.engine)
    assert set(found.tables) == {*Table.metadata.tables, "schema_version"}
    for name, table in Table.metadata.tables.items():
        columns = {column.name: (str(column.type.as_generic()), column.nullable) for column in found.tables[name].c}
        named = {column.name: (str(column.type), bool(column.nullable)) for column in table.c}
        assert columns.keys() == named.keys()
        for column, (kind, nullable) in named.items():
            assert columns[column][1] == nullable, f"{name}.{column}"
            assert _same(columns[column][0], kind), f"{name}.{column}: {columns[column][0]} and {kind}"


def _same(found: str, named: str) -> bool:
    """Compare names of types: both databases have more than one for a float, and for bytes."""
    kinds = {"DOUBLE": "FLOAT", "DOUBLE_PRECISION": "FLOAT", "BLOB": "BYTES", "BYTEA": "BYTES", "LargeBinary": "BYTES"}
    one, other = (kind.split("(53)")[0] for kind in (found, named))
    return kinds.get(one, one) == kinds.get(other, other)


def test_two_services_that_start_at_once_lay_out_one_schema(database_url: str) -> None:
    errors: list[BaseException] = []

    def start() -> None:
        try:
            Catalog(database_url).close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    engine = create_engine(database_url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        assert connection.scalars(text("SELECT version FROM schema_version")).all() == [SCHEMA_VERSION]
    engine.dispose()


OLD = """
CREATE TABLE schema_version (version INTEGER NOT NULL, PRIMARY KEY (version));
CREATE TABLE jobs (serial INTEGER NOT NULL, id VARCHAR(32) NOT NULL, "key" VARCHAR(32) NOT NULL,
    state VARCHAR(16) NOT NULL, cancelling BOOLEAN NOT NULL, body TEXT NOT NULL, PRIMARY KEY (serial), UNIQUE (id));
CREATE INDEX jobs_state ON jobs (state, serial);
CREATE UNIQUE INDEX jobs_active_key ON jobs ("key") WHERE state IN ('queued', 'running');
CREATE TABLE block_index ("key" TEXT NOT NULL, value BLOB NOT NULL, PRIMARY KEY ("key"));
CREATE TABLE rejected_blocks (job_id VARCHAR(32) NOT NULL, ordinal INTEGER NOT NULL, source TEXT NOT NULL,
    "offset" BIGINT NOT NULL, first_line BIGINT NOT NULL, shard VARCHAR(32) NOT NULL, records INTEGER NOT NULL,
    PRIMARY KEY (job_id, ordinal), FOREIGN KEY(job_id) REFERENCES jobs (id));
INSERT INTO schema_version VALUES (1);
"""
"""What version 0.1.0 laid out in a home before tables had migrations."""


def test_a_home_of_the_first_version_opens_with_what_it_holds(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "db")) as connection:
        connection.executescript(OLD)
        rows = [(job(n, state).id, f"k{n}", state, n == 3, job(n, state).model_dump_json()) for n, state in ENDED]
        connection.executemany("INSERT INTO jobs (id, key, state, cancelling, body) VALUES (?, ?, ?, ?, ?)", rows)
        connection.execute("INSERT INTO block_index VALUES ('a', ?)", (b"1",))
        connection.commit()
    with closing(Catalog(f"sqlite:///{tmp_path}/db")) as catalog:
        assert [one.state for one in catalog.jobs()] == [state for _, state in reversed(ENDED)]
        assert catalog.get(["a"]) == {"a": b"1"}
        taken = [catalog.take("a", LEASE) or pytest.fail("these wait") for _ in range(3)]
        assert [(one[0].id, one[2]) for one in taken] == [(job(1).id, False), (job(2).id, False), (job(3).id, True)]
        assert {index["name"] for index in inspect(catalog.engine).get_indexes("jobs")} == {
            "jobs_state",
            "jobs_active_key",
        }


ENDED = [
    (0, JobState.SUCCEEDED),
    (1, JobState.QUEUED),
    (2, JobState.RUNNING),
    (3, JobState.RUNNING),
]


def test_tables_of_a_newer_version_are_refused(database_url: str) -> None:
    with closing(Catalog(database_url)) as catalog, catalog.engine.begin() as connection:
        connection.execute(text("UPDATE schema_version SET version = 99"))
    with pytest.raises(InvalidRequest, match="version 99"):
        Catalog(database_url)


@pytest.mark.parametrize(
    ("url", "error", "words"),
    [
        ("sqlite:////nowhere/at/all/db", Unavailable, "cannot be opened"),
        ("no url", InvalidRequest, "PACKHOUSE_DATABASE_URL"),
        ("nosuchdialect://x/y", InvalidRequest, "PACKHOUSE_DATABASE_URL"),
        ("mysql+pymysql://x/y", InvalidRequest, "PostgreSQL"),
        ("postgresql://nobody@/nowhere?host=/nowhere", Unavailable, "cannot be opened"),
    ],
)
def test_databases_that_cannot_be_used(url: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Catalog(url)
