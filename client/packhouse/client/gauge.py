"""Gauge: what a loop and its loader workers tell each other in shared memory: who has started, and how much waits.

Every number is written by one process alone and there is no lock, so that one that is killed leaves nothing held.
"""

import os
import time

import torch

PAUSE = 0.002
"""Seconds between two looks of a worker that has no room."""


class Gauge:
    """Bounds the bytes that wait in ``workers`` processes by ``budget``, each by an equal share of it.

    A worker begins a batch while what waits of it, and one more like its largest, are within its share; one batch it
    may always have. A pass is one loop over the batches; the loop that begins another, or ends, frees who waits.
    """

    def __init__(self, workers: int, budget: int) -> None:
        self.share = budget // max(1, workers)
        numbers: torch.Tensor = torch.zeros(1 + 3 * workers, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._pass = numbers[:1]
        self._started, self._made, self._taken = numbers[1:].reshape(3, workers)

    def begin(self) -> None:
        """For the loop: begin a pass, or end the last one."""
        self._taken.zero_()
        self._pass += 1

    def has_started(self, worker: int) -> bool:
        """For the loop: return whether a worker has begun this pass."""
        return bool(self._started[worker] == self._pass[0])

    def take(self, worker: int, size: int) -> None:
        """For the loop: note that a batch of ``size`` bytes of a worker waits no longer."""
        self._taken[worker] += size

    def waiting(self) -> list[int]:
        """For the loop: return the bytes that wait of each worker."""
        return [int(size) for size in self._made - self._taken]

    def start(self, worker: int) -> "Making":
        """For a worker: begin the pass."""
        self._made[worker] = 0
        self._started[worker] = self._pass[0]
        return Making(self, worker)


class Making:
    """One worker's side of a pass."""

    def __init__(self, gauge: Gauge, worker: int) -> None:
        self._gauge = gauge
        self._worker = worker
        self._pass = int(gauge._pass[0])
        self._parent = os.getppid()
        self._largest = 0

    def await_room(self) -> None:
        """Return when there is room for one more batch, or nobody wants it any more."""
        gauge, worker = self._gauge, self._worker
        while gauge._pass[0] == self._pass and os.getppid() == self._parent:
            waiting = int(gauge._made[worker] - gauge._taken[worker])
            if waiting <= 0 or waiting + self._largest <= gauge.share:
                return
            time.sleep(PAUSE)

    def add(self, size: int) -> None:
        """Note that a batch of ``size`` bytes waits."""
        self._largest = max(self._largest, size)
        self._gauge._made[self._worker] += size
