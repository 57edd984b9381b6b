"""Shares: counted tasks, no clock; each tick ends the task that has run longest and lets every job ask."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhouse.worker.shares import Share, Shares

ROOM = 4


class Workers:
    """Some workers, and the tasks that jobs still have to begin."""

    def __init__(self, room: int = ROOM) -> None:
        self.shares, self.room = Shares(), room
        self.left: dict[Share, int] = {}
        self.names: dict[Share, str] = {}
        self.running: deque[Share] = deque()
        self.ended: list[str] = []

    def submit(self, name: str, tasks: int, submitter: str = "", weight: float = 1.0) -> None:
        share = self.shares.join(submitter or name, weight)
        self.left[share], self.names[share] = tasks, name

    def tick(self) -> None:
        """Give out what can be given, in any order of asking, and end one task."""
        for share in self.left:
            share.want(self.left[share] > 0)
        given = True
        while given:
            given = False
            for share in reversed(list(self.left)):
                if self.left[share] and share.take(self.room):
                    self.left[share] -= 1
                    share.want(self.left[share] > 0)
                    self.running.append(share)
                    given = True
        if self.running:
            share = self.running.popleft()
            share.give_back()
            self.ended.append(self.names[share])
            if not self.left[share] and share not in self.running:
                share.leave()
                del self.left[share]

    def work(self, ticks: int) -> list[str]:
        before = len(self.ended)
        for _ in range(ticks):
            self.tick()
        return self.ended[before:]


def test_a_small_job_does_not_wait_for_a_huge_one() -> None:
    workers = Workers()
    workers.submit("huge", 10_000)
    workers.work(1000)
    workers.submit("small", 10)
    ended = workers.work(60)
    assert ended.count("small") == 10
    last = len(ended) - ended[::-1].index("small")
    assert last <= ROOM + 2 * 10  # what was in flight, then every other task


def test_submitters_share_equally_whatever_number_of_jobs_they_have() -> None:
    workers = Workers()
    for number in range(10):
        workers.submit(f"ann {number}", 1000, "ann")
    workers.submit("bob", 1000, "bob")
    ended = workers.work(1000)
    assert abs(ended.count("bob") - 500) <= ROOM
    of_ann = [ended.count(f"ann {number}") for number in range(10)]
    assert max(of_ann) - min(of_ann) <= 2


@pytest.mark.parametrize(("priority", "times"), [(1, 2), (3, 8)])
def test_a_step_of_priority_doubles_the_share(priority: int, times: int) -> None:
    workers = Workers()
    workers.submit("plain", 10_000)
    workers.submit("urgent", 10_000, weight=2.0**priority)
    ended = workers.work(900)
    assert ended.count("urgent") == pytest.approx(times * ended.count("plain"), rel=0.05)
    assert workers.work(900).count("plain") > 0  # and nobody starves


def test_who_wanted_nothing_has_saved_up_nothing() -> None:
    workers = Workers()
    workers.submit("idle", 1)
    workers.submit("busy", 10_000)
    workers.work(2000)
    workers.submit("idle again", 2000, "idle")
    assert abs(workers.work(400).count("idle again") - 200) <= ROOM


@pytest.mark.parametrize("submitters", [("ann", "bob"), ("ann", "ann")])
def test_a_newcomer_is_not_ahead_of_one_that_wants_nothing_for_a_moment(submitters: tuple[str, str]) -> None:
    shares = Shares()
    old, new = (shares.join(one) for one in submitters)
    old.want(True)
    for _ in range(100):
        assert old.take(1)
        old.give_back()
    old.want(False)
    new.want(True)
    assert new.take(1)
    new.give_back()
    old.want(True)
    given = []
    for _ in range(10):
        share = next(one for one in (old, new) if one.take(1))
        share.give_back()
        given.append(share)
    assert given.count(old) == 5


def test_a_task_that_was_not_begun_costs_nothing() -> None:
    shares = Shares()
    one, other = shares.join("one"), shares.join("other")
    one.want(True)
    other.want(True)
    for _ in range(50):
        assert one.take(1)
        one.give_back(begun=False)
    assert one.take(1)
    one.give_back()
    assert not one.take(1)
    assert other.take(1)


def test_what_a_job_held_is_free_when_it_leaves() -> None:
    shares = Shares()
    gone, stays = shares.join("gone"), shares.join("stays")
    for share in (gone, stays):
        share.want(True)
    assert gone.take(1)
    assert not stays.take(1)
    gone.leave()
    assert stays.take(1)


def test_a_job_whose_thread_is_held_up_loses_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("packhouse.worker.shares.time.monotonic", lambda: clock[0])
    shares = Shares()
    held, other = shares.join("held"), shares.join("other")
    for share in (held, other):
        share.want(True)
    assert held.take(4)
    assert other.take(4)
    assert not other.take(4)  # it is the first one's turn
    clock[0] += 60
    assert other.take(4)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(-3, 3)), min_size=1, max_size=12))
def test_all_jobs_end_with_no_worker_idle(jobs: list[tuple[int, int, int]]) -> None:
    workers = Workers()
    for number, (submitter, tasks, priority) in enumerate(jobs):
        workers.submit(f"{number}", tasks, f"submitter {submitter}", 2.0**priority)
    total = sum(tasks for _, tasks, _ in jobs)
    for done in range(total):
        workers.tick()
        assert len(workers.running) == min(ROOM - 1, total - done - 1)
    assert {name: workers.ended.count(name) for name in workers.ended} == {
        str(number): tasks for number, (_, tasks, _) in enumerate(jobs)
    }
