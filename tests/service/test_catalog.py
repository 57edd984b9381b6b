"""The catalog: what it remembers, and what it refuses."""

import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from packhouse.client.errors import InvalidRequest, NotFound, Unavailable
from packhouse.client.wire import Job, JobSpec, JobState, Progress
from packhouse.service.catalog import Catalog, RejectedBlock


def job(number: int, state: JobState = JobState.QUEUED) -> Job:
    spec = JobSpec(sources=["/a"], tokenizer="/t")
    now = datetime.now(UTC)
    return Job(id=f"{number:016x}", state=state, spec=spec, recipe="r", version=1, progress=Progress(), created_at=now)


def test_it_remembers_after_it_is_closed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/db"
    with closing(Catalog(url)) as catalog:
        assert catalog.add(job(1), "k1") is None
        catalog.put({"a": b"1", "b": b"2"})
        catalog.put({"b": b"3"})
    with closing(Catalog(url)) as catalog:
        assert catalog.job(job(1).id).spec == job(1).spec
        assert catalog.get(["a", "b", "c"]) == {"a": b"1", "b": b"3"}


def test_one_active_job_a_key(tmp_path: Path) -> None:
    with closing(Catalog(f"sqlite:///{tmp_path}/db")) as catalog:
        catalog.add(job(1), "k")
        twin = catalog.add(job(2), "k")
        assert twin is not None
        assert twin.id == job(1).id
        catalog.save(job(1, JobState.SUCCEEDED))
        assert catalog.add(job(2), "k") is None


def test_jobs_are_listed_newest_first_in_pages(tmp_path: Path) -> None:
    with closing(Catalog(f"sqlite:///{tmp_path}/db")) as catalog:
        for number in range(5):
            catalog.add(job(number), f"k{number}")
        catalog.save(job(3, JobState.FAILED))
        first = catalog.jobs(limit=2)
        assert [one.id for one in first] == [job(4).id, job(3).id]
        assert [one.id for one in catalog.jobs(before=first[-1].id)] == [job(2).id, job(1).id, job(0).id]
        assert [one.id for one in catalog.jobs(state=JobState.FAILED)] == [job(3).id]
        assert [one.id for one, _ in catalog.unfinished()] == [job(n).id for n in (0, 1, 2, 4)]


def test_many_keys_at_once(tmp_path: Path) -> None:
    with closing(Catalog(f"sqlite:///{tmp_path}/db")) as catalog:
        items = {f"key {number}": str(number).encode() for number in range(40_000)}
        catalog.put(items)
        assert catalog.get(list(items)) == items


def test_rejected_blocks_keep_their_order(tmp_path: Path) -> None:
    blocks = [RejectedBlock(f"/{n}", 5_000_000_000 + n, n, "s", 1) for n in range(12)]
    with closing(Catalog(f"sqlite:///{tmp_path}/db")) as catalog:
        catalog.add(job(1), "k")
        catalog.keep_rejected(job(1).id, blocks)
        catalog.keep_rejected(job(1).id, blocks)
        assert list(catalog.rejected(job(1).id)) == blocks


def test_unknown_job(tmp_path: Path) -> None:
    with closing(Catalog(f"sqlite:///{tmp_path}/db")) as catalog, pytest.raises(NotFound, match="no job 'x'"):
        catalog.job("x")


def test_tables_of_another_version_are_refused(tmp_path: Path) -> None:
    Catalog(f"sqlite:///{tmp_path}/db").close()
    with closing(sqlite3.connect(tmp_path / "db")) as connection:
        connection.execute("UPDATE schema_version SET version = 99")
        connection.commit()
    with pytest.raises(InvalidRequest, match="version 99"):
        Catalog(f"sqlite:///{tmp_path}/db")


@pytest.mark.parametrize(
    ("url", "error", "words"),
    [
        ("sqlite:////nowhere/at/all/db", Unavailable, "cannot be opened"),
        ("no url", InvalidRequest, "PACKHOUSE_DATABASE_URL"),
        ("nosuchdialect://x/y", InvalidRequest, "PACKHOUSE_DATABASE_URL"),
    ],
)
def test_databases_that_cannot_be_used(url: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Catalog(url)
