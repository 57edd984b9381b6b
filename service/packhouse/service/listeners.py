"""Who follows which job."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Listener = Callable[[bool], None]
"""Told of a change of a job, and whether it is urgent: a change of state rather than of progress."""


class Listeners:
    """The listeners of all jobs. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_job: dict[str, set[Listener]] = {}

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._by_job.values()))

    def jobs(self) -> list[str]:
        """Return the ids of the jobs that someone follows."""
        with self._lock:
            return list(self._by_job)

    @contextmanager
    def listening(self, job_id: str, listener: Listener) -> Iterator[None]:
        """Tell ``listener`` of each change of a job while the context lasts; it must be quick and must not block."""
        with self._lock:
            self._by_job.setdefault(job_id, set()).add(listener)
        try:
            yield
        finally:
            with self._lock:
                listeners = self._by_job[job_id]
                listeners.discard(listener)
                if not listeners:
                    del self._by_job[job_id]

    def tell(self, job_id: str, *, urgent: bool) -> None:
        """Tell the listeners of a job that it has changed."""
        with self._lock:
            listeners = list(self._by_job.get(job_id, ()))
        for listener in listeners:
            with suppress(RuntimeError):  # the listener's event loop has ended
                listener(urgent)

    def tell_all(self) -> None:
        """Tell every listener."""
        for job_id in self.jobs():
            self.tell(job_id, urgent=True)
