"""Single flight: what jobs that run at once have in common is made once, whatever becomes of who makes it."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.worker.cache_place import CachePlace, settle, write

from packhouse.client.errors import PackhouseError, Unavailable
from packhouse.client.store import LocalStore
from packhouse.client.wire import Progress
from packhouse.worker import crew, encoding
from packhouse.worker.flights import Flights
from packhouse.worker.pipeline import Cancelled, Outcome


@pytest.fixture
def place(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> CachePlace:
    """Every block is a task of its own, and waits are short."""
    monkeypatch.setattr(encoding, "TASK_BLOCKS", 1)
    monkeypatch.setattr(encoding, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(crew, "TICK_SECONDS", 0.02)
    return CachePlace(LocalStore(tmp_path / "store"), tiny)


def some(folder: Path, count: int) -> list[Path]:
    paths = [folder / f"{index}.jsonl" for index in range(count)]
    for index, path in enumerate(paths):
        path.write_text(f'{{"text": "text {index} {"x" * index}"}}\n')
    settle(*paths)
    return paths


class Gate:
    """Holds the first task of a job until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, blocks: list[Any]) -> None:
        self.reached.set()
        assert self.opened.wait(20)


def start(run: Callable[[], Outcome]) -> "Future[Outcome]":
    pool = ThreadPoolExecutor(1)
    future = pool.submit(run)
    pool.shutdown(wait=False)
    return future


def test_the_same_job_eight_times_at_once_encodes_each_block_once(place: CachePlace, tmp_path: Path) -> None:
    paths, together = some(tmp_path, 6), threading.Barrier(8)

    def run() -> tuple[Outcome, int, int]:
        mine = CachePlace(place.store, place.tokenizer, place.index, place.flights, place.encoded)
        together.wait(20)
        outcome = mine.run(*paths)
        return outcome, mine.last.hits, sum(mine.last.misses.values())

    with ThreadPoolExecutor(8) as pool:
        results = [future.result() for future in [pool.submit(run) for _ in range(8)]]
    assert len({outcome.dataset_id for outcome, _, _ in results}) == 1
    assert sorted(place.encoded.values()) == [1] * 6
    assert sum(misses for _, _, misses in results) == 6
    assert all(hits + misses == 6 for _, hits, misses in results)


def test_jobs_that_overlap_share_what_they_have_in_common(place: CachePlace, tmp_path: Path) -> None:
    paths, gate = some(tmp_path, 5), Gate()
    first = start(lambda: place.run(*paths[:3], before=gate))
    assert gate.reached.wait(20)
    other = CachePlace(place.store, place.tokenizer, place.index, place.flights, place.encoded)
    mine: list[str] = []

    def note(blocks: list[Any]) -> None:
        mine.append(Path(blocks[0].source).stem)
        if len(mine) == 2:  # by now it has come to those that the first one holds
            gate.opened.set()

    second = start(lambda: other.run(*paths[1:], before=note))
    second.result(20)
    first.result(20)
    assert mine == ["4", "3"], "heaviest first, without those that the first one makes"
    assert sorted(place.encoded.values()) == [1] * 5
    assert (other.last.shared, other.last.hits, other.last.blocks_done) == (2, 2, 4)
    alone = CachePlace(LocalStore(tmp_path / "alone"), place.tokenizer)
    assert alone.run(*paths[1:]) == second.result()


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_who_waits_takes_over_from_a_job_that_is_cancelled_or_fails(
    place: CachePlace, tmp_path: Path, end: str
) -> None:
    paths, gate, cancelled = some(tmp_path, 3), Gate(), threading.Event()

    def hold(blocks: list[Any]) -> None:
        gate(blocks)
        raise Cancelled if end == "cancelled" else Unavailable("the node was lost")

    first = start(lambda: place.run(*paths, before=hold, cancelled=cancelled))
    assert gate.reached.wait(20)
    other = CachePlace(place.store, place.tokenizer, place.index, place.flights, place.encoded)
    second = start(lambda: other.run(*paths))
    while not place.encoded and not second.done() and len(list(place.store.list("shards"))) == 0:
        threading.Event().wait(0.01)
    assert not second.done(), "it waits for the block that the first one holds"
    gate.opened.set()
    with pytest.raises((Cancelled, PackhouseError)):
        first.result(20)
    assert len(second.result(20).blocks) == 3
    assert sum(other.last.misses.values()) == 3
    assert other.last.shared == 0


def test_what_another_job_landed_since_the_lookup_is_not_made_again(place: CachePlace, tmp_path: Path) -> None:
    paths, looked, landed = some(tmp_path, 3), threading.Event(), threading.Event()

    def pause(progress: Progress) -> None:
        if progress.phase == "encoding" and not looked.is_set():
            looked.set()
            assert landed.wait(20)

    other = CachePlace(place.store, place.tokenizer, place.index, place.flights)
    late = start(lambda: other.run(*paths, tell=pause))
    assert looked.wait(20)
    outcome = place.run(*paths)
    landed.set()
    assert late.result(20) == outcome
    assert (sum(other.encoded.values()), other.last.shared, other.last.misses) == (0, 3, {})


def test_who_waits_can_be_cancelled(place: CachePlace, tmp_path: Path) -> None:
    paths, gate, cancelled = some(tmp_path, 1), Gate(), threading.Event()
    first = start(lambda: place.run(*paths, before=gate))
    assert gate.reached.wait(20)
    other = CachePlace(place.store, place.tokenizer, place.index, place.flights)
    second = start(lambda: other.run(*paths, cancelled=cancelled))
    cancelled.set()
    with pytest.raises(Cancelled):
        second.result(20)
    gate.opened.set()
    first.result(20)
    assert place.flights._makers == {}, "nothing stays claimed"


def test_another_recipe_does_not_wait(place: CachePlace, tmp_path: Path) -> None:
    path, gate = write(tmp_path / "a.jsonl", "a"), Gate()
    first = start(lambda: place.run(path, before=gate))
    assert gate.reached.wait(20)
    other = CachePlace(place.store, place.tokenizer, place.index, place.flights)
    other.run(path, max_length=3)
    assert other.last.misses == {"new_block": 1}
    gate.opened.set()
    first.result(20)


def test_a_claim_is_its_maker_s_until_it_lands_or_leaves() -> None:
    flights, one, other = Flights(), object(), object()
    assert flights.claim("k", one)
    assert flights.claim("k", one), "again"
    assert not flights.claim("k", other)
    flights.land(["k"], other)
    assert not flights.claim("k", other), "only its maker can land it"
    flights.land(["k"], one)
    assert flights.claim("k", other)
    assert flights.claim("l", one)
    flights.leave(other)
    assert flights.claim("k", one)
    assert not flights.claim("l", other)
