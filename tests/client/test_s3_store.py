"""The store in a bucket: the same contract, and requests that are tried again."""

import logging
import pickle
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from tests.s3_server import PAGE, S3Server

from packhouse.client.errors import InvalidRequest, NotFound, Unavailable
from packhouse.client.remote import object_store
from packhouse.client.s3_store import S3Store
from packhouse.client.store import LocalStore, Store, store_at

LARGE = b"x" * (11 << 20)
"""Takes two parts."""


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return LocalStore(tmp_path)
    server: S3Server = request.getfixturevalue("s3_server")
    return store_at(server.uri("contract", tmp_path.name))


@pytest.fixture
def bucket(s3_server: S3Server, tmp_path: Path) -> S3Store:
    s3_server.fail(0, 0)
    return S3Store(s3_server.uri("faults", tmp_path.name), patience=5)


def test_both_stores_keep_one_contract(store: Store) -> None:
    store.check()
    files = {f"d/{name}": name.encode() * 3 for name in ("b", "a", "A10", "é", "a.x/y", "a-/z")}
    for key, data in {**files, "e/other": b"", "large": LARGE}.items():
        store.write(key, pa.py_buffer(data))
    assert list(store.list("d")) == sorted(files, key=str.encode)
    assert {key: bytes(store.open(key)) for key in files} == files
    assert (store.size("e/other"), store.size("large"), store.size("d"), store.size("d/none")) == (
        0,
        11 << 20,
        None,
        None,
    )
    assert store.sizes(["e/other", "none", "large"]) == [0, None, 11 << 20]
    assert bytes(store.open("large")) == LARGE
    assert bytes(store.open("e/other")) == b""
    assert b"".join(store.pieces("large")) == LARGE
    assert list(store.pieces("e/other")) == []
    store.write("d/a", b"new")
    assert bytes(store.open("d/a")) == b"new"
    store.move("d/a", "q/r/a")
    store.move("none", "q/none")
    store.delete("d/b")
    store.delete("d/b")
    assert [*store.list("d"), *store.list("q"), *store.list("none")] == ["d/A10", "d/a-/z", "d/a.x/y", "d/é", "q/r/a"]
    assert bytes(pickle.loads(pickle.dumps(store)).open("q/r/a")) == b"new"
    for read in (store.open, lambda key: list(store.pieces(key))):
        with pytest.raises(NotFound, match="has no d/b"):
            read("d/b")
    assert store.sweep() == 0


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "./a"])
def test_no_key_leaves_the_prefix(bucket: S3Store, key: str) -> None:
    calls: list[Callable[[str], object]] = [
        bucket.open,
        bucket.size,
        bucket.delete,
        lambda name: bucket.write(name, b"x"),
        lambda name: bucket.move(name, "b"),
        lambda name: bucket.move("b", name),
        lambda name: list(bucket.list(name)),
    ]
    for call in calls:
        with pytest.raises(InvalidRequest, match="not a store key"):
            call(key)


def test_lists_of_more_than_a_page_are_whole(bucket: S3Store, s3_server: S3Server) -> None:
    client, prefix = s3_server.client(), bucket.location.partition("faults/")[2]
    for number in range(3 * PAGE + 1):
        client.put_object(Bucket="faults", Key=f"{prefix}/many/{number:04}", Body=b"")
    assert list(bucket.list("many")) == [f"many/{number:04}" for number in range(3 * PAGE + 1)]
    assert s3_server.asked()["GET"] >= 4


@pytest.mark.parametrize(
    ("method", "status", "call"),
    [
        ("PUT", 500, lambda store: store.write("a", b"new")),
        ("PUT", 503, lambda store: store.write("a", LARGE)),
        ("POST", 503, lambda store: store.write("a", LARGE)),
        ("GET", 500, lambda store: store.open("a")),
        ("HEAD", 429, lambda store: store.size("a")),
        ("GET", 503, lambda store: list(store.list("d"))),
        ("DELETE", 502, lambda store: store.delete("a")),
        ("PUT", 503, lambda store: store.move("a", "b")),
    ],
)
def test_what_may_pass_is_tried_again_and_counted(
    bucket: S3Store,
    s3_server: S3Server,
    caplog: pytest.LogCaptureFixture,
    method: str,
    status: int,
    call: Callable[[S3Store], object],
) -> None:
    bucket.write("a", b"old")
    s3_server.fail(status, 2, method=method)
    with caplog.at_level(logging.WARNING):
        call(bucket)
    assert bucket.retries in (1, 2)  # two parts of one object may fail together
    assert "trying again" in caplog.text
    assert "test:test" not in caplog.text


def test_a_server_that_stays_away_is_named(bucket: S3Store, s3_server: S3Server) -> None:
    bucket.write("a", b"x")
    impatient = S3Store(s3_server.uri("faults", bucket.location.partition("faults/")[2]), patience=0.2)
    s3_server.fail(503, 100)
    with pytest.raises(Unavailable, match=r"the store s3://faults/\S+ did not answer in 0.2 s"):
        impatient.open("a")
    s3_server.fail(403, 1)
    with pytest.raises(Unavailable, match=r"refuses .*ACCESS_DENIED.*check its keys"):
        bucket.open("a")
    assert bucket.retries == 0


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize(("status", "method"), [(503, "PUT"), (403, "PUT"), (503, "POST")])
def test_a_failed_write_shows_nothing(
    bucket: S3Store, s3_server: S3Server, status: int, method: str, skip: int
) -> None:
    """The first part, the second one, the beginning and the end of an upload."""
    impatient = S3Store(s3_server.uri("faults", bucket.location.partition("faults/")[2]), patience=0)
    s3_server.fail(status, 1, method=method, skip=skip)
    with pytest.raises(Unavailable):
        impatient.write("large", LARGE)
    assert bucket.size("large") is None
    assert list(bucket.list("large")) == []
    bucket.write("large", LARGE)
    assert bucket.size("large") == len(LARGE)


def test_a_bucket_that_is_not_there_is_named_at_once(s3_server: S3Server) -> None:
    uri = s3_server.uri("there").replace("there", "not-there")
    with pytest.raises(Unavailable, match=r"there is no bucket 'not-there'.*PACKHOUSE_STORE"):
        store_at(uri).check()


def test_keys_are_not_told(s3_server: S3Server, tmp_path: Path) -> None:
    store = S3Store("s3://mine:hidden@bucket/a?region=x")
    assert "hidden" not in f"{store.location} {store!r} {store._address!r}"
    with pytest.raises(InvalidRequest) as refused:
        S3Store("s3://mine:hid/den@bucket/a")
    with pytest.raises(NotFound, match=r"the store s3://secret/a has no datasets/x") as absent:
        object_store(s3_server.uri("secret", "a").replace("test:test", "mine:hidden"), tmp_path).open("datasets/x")
    assert "hid" not in f"{refused.value} {absent.value}"
