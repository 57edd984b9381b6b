"""Places: sources in a bucket are listed, fingerprinted and read like files, and what goes wrong is said."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from tests.s3_server import PAGE, S3Server
from tests.worker.crash import Index, run_job
from tests.worker.kinds import KINDS, LINES, ROWS, records, write

from packhouse.client.errors import InvalidRequest, PackhouseError, Unavailable
from packhouse.client.wire import JobSpec
from packhouse.service.work import CacheWork
from packhouse.worker import cutting, places
from packhouse.worker.sources import Fingerprint, SourceChanged, expand, fingerprints, read, scan
from packhouse.worker.unpacked import first_records


class Bucket:
    """A bucket, and the address of what is put into it."""

    def __init__(self, server: S3Server, name: str) -> None:
        self.server, self.name, self.client = server, name, server.client()
        server.fail(0, 0)
        server.uri(name)

    def put(self, key: str, data: bytes) -> str:
        self.client.put_object(Bucket=self.name, Key=key, Body=data)
        return self.at(key)

    def at(self, key: str) -> str:
        return f"s3://{self.name}/{key}"


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """A bucket of the test's own, which the workers find as they find any: by their environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
    for name, value in {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    places._connected.cache_clear()
    yield Bucket(s3_server, f"sources-{zlib.crc32(request.node.name.encode())}")
    places._connected.cache_clear()


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that fail are not made again."""
    monkeypatch.setattr(places, "ATTEMPTS", 1)


@pytest.mark.parametrize("kind", ["jsonl", *KINDS])
def test_every_kind_of_object_has_the_blocks_of_the_same_file(
    kind: str, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "NARROWEST", 10_000)
    monkeypatch.setattr(cutting, "WIDEST", 20_000)
    path = write(tmp_path / f"a.{kind}", kind)
    source = bucket.put(f"data/a.{kind}", path.read_bytes())
    assert expand([bucket.at("data")]) == [source]
    ours, local = scan(source), scan(str(path))
    assert len(ours) > 2
    assert [(one.digest, one.offset, one.first_line) for one in ours] == [
        (one.digest, one.offset, one.first_line) for one in local
    ]
    assert records(ours) == ROWS
    assert first_records([source])[:5] == ROWS[:5]


def test_a_dataset_does_not_depend_on_the_place(
    bucket: Bucket, tmp_path: Path, tiny: Path, memory_store: type[Any]
) -> None:
    files = {"a.jsonl": LINES, "b.txt": b"one document", "c.jsonl": b'{"text": "no end"}'}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        bucket.put(name, data)
    local = JobSpec(sources=[str(tmp_path / name) for name in files], tokenizer=str(tiny))
    remote = JobSpec(sources=[bucket.at(name) for name in files], tokenizer=str(tiny))
    made = run_job(memory_store(), remote)
    assert made.rows == len(ROWS) + 2
    assert made == run_job(memory_store(), local)


def test_a_job_on_objects_is_looked_at_when_it_comes_in(bucket: Bucket, tiny: Path, memory_store: type[Any]) -> None:
    work: Any = CacheWork(memory_store(), catalog=cast(Any, Index()), executor=cast(Any, None))
    filled, empty = bucket.put("a.jsonl", b'{"messages": []}\n'), bucket.put("b.jsonl", b"")
    resolved = work.check(JobSpec(sources=[empty, filled], tokenizer=str(tiny)))
    assert resolved.recipe_.record == "messages", "the first records were read"
    assert f"the source {empty!r} is empty" in resolved.warnings


def test_prefixes_and_globs_are_sorted_by_bytes(bucket: Bucket) -> None:
    names = ["b.jsonl", "A10.jsonl", "a.jsonl", "deep/c.ndjson", "é.jsonl", "deep/x/d.jsonl", "notes.md"]
    names += [f"many/{number}.jsonl" for number in range(PAGE + 5)]
    for name in names:
        bucket.put(f"data/{name}", b"{}\n")
    taken = sorted((name for name in names if name != "notes.md"), key=str.encode)
    everything = [bucket.at(f"data/{name}") for name in taken]
    for source in (bucket.at("data"), bucket.at("data/"), f"s3://{bucket.name}", bucket.at("da*") + "/**/*.*json*"):
        assert expand([source]) == everything, source
    assert expand([bucket.at("data/*.jsonl")]) == [one for one in everything if one.count("/") == 4]
    assert expand([bucket.at("data/deep/**")]) == [bucket.at("data/deep/c.ndjson"), bucket.at("data/deep/x/d.jsonl")]
    assert expand([bucket.at("data/[ab].jsonl")]) == [bucket.at("data/a.jsonl"), bucket.at("data/b.jsonl")]
    assert expand([bucket.at("data/notes.md")]) == [bucket.at("data/notes.md")], "one that is named is taken"


def test_an_object_written_anew_has_another_fingerprint(bucket: Bucket) -> None:
    source = bucket.put("a.jsonl", b'{"text": "a"}\n')
    first = Fingerprint.of(source)
    assert first.settled(), "its ETag tells of every write"
    assert fingerprints([source]) == {source: first}
    bucket.put("a.jsonl", b'{"text": "b"}\n')
    assert Fingerprint.of(source).size == first.size
    assert Fingerprint.of(source).key != first.key


@pytest.mark.parametrize("data", [b'{"text": "b"}\n', b"{}\n", None], ids=["same size", "shorter", "gone"])
def test_an_object_that_changes_while_a_job_runs_fails_it(data: bytes | None, bucket: Bucket) -> None:
    source = bucket.put("a.jsonl", b'{"text": "a"}\n')
    (block,) = scan(source)
    assert read(block) == b'{"text": "a"}\n'
    if data is None:
        bucket.client.delete_object(Bucket=bucket.name, Key="a.jsonl")
    else:
        bucket.put("a.jsonl", data)
    with pytest.raises(SourceChanged, match=source):
        read(block)


def test_a_block_is_read_by_its_range_alone(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "NARROWEST", 10_000)
    monkeypatch.setattr(cutting, "WIDEST", 20_000)
    source = bucket.put("a.jsonl", LINES)
    block = scan(source)[2]
    bucket.server.fail(0, 0)
    assert read(block) == LINES[block.offset : block.offset + block.length]
    assert bucket.server.asked() == {"HEAD": 1, "GET": 1}


def test_a_request_that_fails_is_made_again(bucket: Bucket) -> None:
    source = bucket.put("a.jsonl", LINES)
    blocks = scan(source)
    for method in ("HEAD", "GET"):
        bucket.server.fail(503, times=1, method=method)
        assert scan(source) == blocks
        assert bucket.server.asked()[method] >= 2


@pytest.mark.usefixtures("once")
def test_a_store_that_does_not_answer_is_no_changed_source(bucket: Bucket) -> None:
    source = bucket.put("a.jsonl.gz", gzip.compress(LINES))
    (block,) = scan(source)
    for call in (lambda: scan(source), lambda: read(block), lambda: expand([source]), lambda: first_records([source])):
        for method in ("HEAD", "GET"):
            bucket.server.fail(503, times=100, method=method)
            with pytest.raises(Unavailable, match=r"did not give the source .*503"):
                call()


@pytest.mark.usefixtures("once")
def test_what_may_not_be_read_is_said_before_a_job_runs(bucket: Bucket) -> None:
    source = bucket.put("a.jsonl", LINES)
    bucket.server.fail(403, times=100)
    with pytest.raises(InvalidRequest, match=r"may not be read.*AWS_ACCESS_KEY_ID"):
        expand([source])


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("s3://BUCKET/missing.jsonl", "names no object"),
        ("s3://BUCKET/missing/*.jsonl", "names no object"),
        ("s3://no-such-bucket/a.jsonl", "names no object"),
        ("s3://no-such-bucket/*.jsonl", "names no object"),
        ("s3://BUCKET/a.jsonl?endpoint_override=example.org", "names no object"),
        ("s3://key:secret@BUCKET/a.jsonl", "without a bucket's name"),
        ("s3://", "without a bucket's name"),
        ("s3:///a.jsonl", "without a bucket's name"),
        ("s3://BUCKET/../other/a.jsonl", "cannot be listed"),
        ("s3://BUCKET//a.jsonl", "cannot be listed"),
    ],
)
def test_what_names_no_object_is_refused(source: str, match: str, bucket: Bucket) -> None:
    bucket.put("a.jsonl", b"{}\n")
    with pytest.raises(InvalidRequest, match=match) as refusal:
        expand([source.replace("BUCKET", bucket.name)])
    assert "secret" not in str(refusal.value)


def test_an_object_of_another_kind_is_refused(bucket: Bucket) -> None:
    with pytest.raises(PackhouseError, match="is a bzip2 file"):
        expand([bucket.put("a.jsonl", b"BZh91AY")])
    with pytest.raises(PackhouseError, match="cannot be read to its end"):
        scan(bucket.put("b.jsonl.gz", gzip.compress(LINES)[:-9]))
