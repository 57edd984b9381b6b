"""Shares: which job gives the workers its next task, so that submitters, and the jobs of each, get equal shares.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) in two steps: first among submitters, then among the jobs of the
one whose turn it is. A task costs its job and its submitter 1, divided by the job's weight. Whoever comes, or comes
back after having wanted nothing, starts where the others are: nothing is saved up, and nobody waits for ever. Whose
turn it is follows from what was given alone, and not from a clock, as long as every job asks.
"""

import math
import threading
import time
from dataclasses import dataclass, field

PATIENCE_SECONDS = 2.0
"""A job that wants a task and has not asked for one for so long, because its thread is held up, loses its turn."""


@dataclass(eq=False, slots=True)
class _Account:
    """What a submitter or a job was given, in tasks by weight."""

    given: float = 0.0
    wants: int = 0
    """1 for a job that wants a task; of a submitter, how many of its jobs do."""
    reached: float = 0.0
    """Of a submitter: what the job that had the last turn was given before it."""


@dataclass(eq=False, slots=True)
class Share:
    """The share of one job; its crew asks it for every task."""

    shares: "Shares"
    submitter: str
    weight: float
    account: _Account = field(default_factory=_Account)
    running: int = 0
    asked_at: float = -math.inf

    def want(self, wants: bool) -> None:
        """Say whether there is a task to begin: who wants none lets the others go on."""
        self.shares.want(self, wants)

    def take(self, room: int) -> bool:
        """Begin a task if it is this job's turn and fewer than ``room`` run, of all jobs; return whether it may."""
        return self.shares.take(self, room)

    def give_back(self, *, begun: bool = True) -> None:
        """Tell that a task has ended; one that was not ``begun`` after all costs nothing."""
        self.shares.give_back(self, begun)

    def wait(self, seconds: float) -> None:
        """Return when a task of any job has ended, after at most ``seconds``."""
        self.shares.wait(seconds)

    def leave(self) -> None:
        """Give everything back."""
        self.shares.leave(self)


class Shares:
    """The shares of all jobs that run in this process. Any thread may call any method."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._jobs: dict[Share, None] = {}
        self._submitters: dict[str, _Account] = {}
        self._reached = 0.0
        """What the submitter that had the last turn was given before it."""
        self._running = 0

    def join(self, submitter: str = "", weight: float = 1.0) -> Share:
        """Return the share of a job that begins."""
        share = Share(self, submitter, weight)
        with self._changed:
            self._jobs[share] = None
            self._submitters.setdefault(submitter, _Account())
        return share

    def want(self, share: Share, wants: bool) -> None:
        """See ``Share.want``."""
        with self._changed:
            if bool(share.account.wants) == wants:
                return
            whole = self._submitters[share.submitter]
            share.asked_at = time.monotonic()
            if wants:
                share.account.given = max(share.account.given, whole.reached)
                if not whole.wants:
                    whole.given = max(whole.given, self._reached)
            share.account.wants = int(wants)
            whole.wants += 1 if wants else -1
            self._changed.notify_all()

    def take(self, share: Share, room: int) -> bool:
        """See ``Share.take``."""
        with self._changed:
            share.asked_at = time.monotonic()
            if self._running >= room or self._next() is not share:
                return False
            whole = self._submitters[share.submitter]
            self._reached, whole.reached = whole.given, share.account.given
            self._running += 1
            share.running += 1
            self._charge(share, 1)
            return True

    def give_back(self, share: Share, begun: bool) -> None:
        """See ``Share.give_back``."""
        with self._changed:
            share.running -= 1
            self._running -= 1
            if not begun:
                self._charge(share, -1)
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """See ``Share.wait``."""
        with self._changed:
            self._changed.wait(seconds)

    def leave(self, share: Share) -> None:
        """See ``Share.leave``."""
        self.want(share, False)
        with self._changed:
            self._running -= share.running
            share.running = 0
            self._jobs.pop(share, None)
            if not any(one.submitter == share.submitter for one in self._jobs):
                self._submitters.pop(share.submitter, None)
            self._changed.notify_all()

    def _next(self) -> Share | None:
        """Return the job whose turn it is; of equals the one that came first."""
        late = time.monotonic() - PATIENCE_SECONDS
        waiting = [one for one in self._jobs if one.account.wants and one.asked_at > late]
        given = lambda one: (self._submitters[one.submitter].given, one.account.given)  # noqa: E731
        return min(waiting, key=given, default=None)

    def _charge(self, share: Share, tasks: int) -> None:
        share.account.given += tasks / share.weight
        self._submitters[share.submitter].given += tasks / share.weight
