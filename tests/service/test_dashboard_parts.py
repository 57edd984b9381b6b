"""What pages are made of: history, buckets of time, lines of sources, figures of datasets, streams."""

import asyncio
import gzip
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from tests.service.house import NOW, House, job

from packhouse.client.store import LocalStore
from packhouse.client.wire import JobSpec, JobState, Miss, Progress, Rejected
from packhouse.service.dashboard import render
from packhouse.service.dashboard.dataset_facts import FactsOfDatasets
from packhouse.service.dashboard.history import History
from packhouse.service.dashboard.lines import UNPACKED, offences
from packhouse.service.dashboard.live import event, of_jobs
from packhouse.service.dashboard.pictures import WINDOWS, over_time
from packhouse.service.tables import JobRow
from packhouse.worker.lookup import remember_blocks
from packhouse.worker.work import scan_sources

WriteDataset = Callable[..., str]


def test_an_event_has_each_line_of_the_html_as_data() -> None:
    assert event("<p>\na\r\nb\rc</p>") == "data: <p>\ndata: a\ndata: b\ndata: c</p>\n\n"


def test_the_stream_of_all_jobs_tells_what_is_new_and_ends_with_the_service(house: House) -> None:
    jobs, shown = house.web.app.state.parts.jobs, iter("aab")  # type: ignore[attr-defined]

    async def followed() -> list[str]:
        told = []
        async for one in of_jobs(jobs, lambda: next(shown, "b"), heartbeat=0.05, pace=0.06):
            told.append(one)
            if len(told) == 5:
                jobs.hang_up()
        return told

    told = asyncio.run(followed())
    assert [one.split("\n")[0] for one in told] == [
        "retry: 1000",
        "data: a",
        ": nothing new",
        "data: b",
        ": nothing new",
    ]


def test_history_takes_each_job_once_and_when_it_has_ended(house: House) -> None:
    history = History(house.catalog.engine)
    house.add(job(1, dataset="d" * 32), job(2, JobState.RUNNING), job(3, dataset="e" * 32))
    assert [one.id for one in history.since(0)] == [job(1).id, job(3).id]
    with house.catalog.engine.begin() as connection:
        ended = job(
            2, dataset="d" * 32, spec=JobSpec(sources=["/b/last.jsonl", "/c"], tokenizer="/t/big", max_length=9)
        )
        change = {"state": ended.state, "body": ended.model_dump_json()}
        connection.execute(update(JobRow).where(JobRow.id == ended.id).values(change))
    history._looked = -10
    assert [one.id for one in history.since(0)] == [job(1).id, job(3).id, job(2).id]
    made = history.made("d" * 32)
    assert made is not None
    assert (made.title, made.recipe_title) == ("last.jsonl and 1 more", "big · up to 9")
    assert history.since(NOW.timestamp() + 1) == []


def test_jobs_fall_into_the_bucket_in_which_they_ended(house: House) -> None:
    miss = Miss(reason="tokenizer", blocks=3, bytes=30_000_000)
    progress = Progress(hits=5, misses={"tokenizer": 3}, why=[miss], mb_per_s=10.0)
    ends = [NOW, NOW - timedelta(minutes=29), NOW - timedelta(minutes=31), NOW - timedelta(days=9)]
    house.add(*(job(number, ended=end, progress=progress) for number, end in enumerate(ends)))
    seen = over_time(History(house.catalog.engine).since(0), WINDOWS["day"], NOW.timestamp())
    assert seen.labels[-2:] == ["11:00", "12:00"]
    assert (seen.blocks["hit"][-2:], seen.blocks["tokenizer"][-2:]) == ([5, 10], [3, 6])
    assert seen.outcomes == {"hit": 15, "tokenizer": 9}
    assert seen.rates[-3:] == [0.0, 10.0, 10.0]


def source_with(path: Path, lines: list[bytes]) -> Path:
    data = b"\n".join(lines)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def rejected(path: Path, lines: list[bytes], line: int) -> Rejected:
    offset = sum(len(one) + 1 for one in lines[: line - 1])
    told: dict[str, Any] = {"reason": "invalid_json", "detail": "no"}
    return Rejected(source=str(path), line=line, offset=offset, length=len(lines[line - 1]), **told)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_an_offending_line_is_shown_while_its_source_is_what_the_job_read(
    house: House, tmp_path: Path, name: str
) -> None:
    lines = [b'{"text": "a"}', b"", b"<script>\x00\xff \xe2\x80\xae", b'{"text": "b"}', b"x" * 5000]
    path = source_with(tmp_path / name, lines)
    time.sleep(0.15)  # a file that may still change within its clock's grain is not remembered
    remember_blocks(scan_sources([str(path)], "file"), house.catalog)
    records = [rejected(path, lines, 3), rejected(path, lines, 5)]
    short, long = offences(job(), records, house.catalog)
    assert (short.text, short.cut) == ("<script>␀� [U+202E]", 0)
    assert (long.text, long.cut) == ("x" * 2000, 3000)
    far = records[0].model_copy(update={"offset": UNPACKED, "length": 1})
    (deep,) = offences(job(), [far], house.catalog)
    assert deep.why_not == ("it lies too deep in a source that has to be unpacked" if "gz" in name else "")
    source_with(path, [b"secret", *lines])
    assert [one.text for one in offences(job(), records, house.catalog)] == [None, None]
    path.unlink()
    assert offences(job(), records, house.catalog)[0].why_not == "the source is not there any more"


class Gated(LocalStore):
    """A store that opens nothing before it may."""

    gate = threading.Event()

    def open(self, key: str) -> Any:
        assert self.gate.wait(10)
        return super().open(key)


def test_a_page_does_not_wait_for_a_dataset_that_takes_long(house: House, write_dataset: WriteDataset) -> None:
    dataset = write_dataset(house.store, [[n] for n in range(300)], rows_per_shard=3)
    store = Gated(house.store.location)
    facts = FactsOfDatasets(store)
    assert facts(dataset, patience=0) is None
    store.gate.set()
    known = facts(dataset, patience=10)
    assert known is not None
    assert (known.shards, known.looked_at, known.rows) == (100, 64, 300)
    assert facts(dataset, patience=0) is known
    assert 'role="status"' in render.fragment("counting.html", dataset_id=dataset)
