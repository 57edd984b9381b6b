"""Ray, and all that the pipeline needs of it: start, submit, wait, cancel. No other file knows it."""

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from packhouse.client.errors import PackhouseError, Unavailable
from packhouse.worker.shares import Shares

log = logging.getLogger(__name__)

Task = Any
"""A running call, as Ray refers to it."""

# Ray reads its own environment when it is imported, so that is done at the start, and these are set before.
_RAY_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# By this name Ray keeps a node to itself, on any system: its ports listen on loopback only.
_RAY_LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

_WORKER_ENVIRONMENT = {
    # A task has one CPU; libraries that would take them all are told so.
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


PATIENCE_SECONDS = 2.0
"""How long a cancelled task may take to end by itself."""


ANSWER_SECONDS = 2.0
"""How long a cluster's head may take to accept a connection."""
LEAVE_SECONDS = 10.0
"""How long calls that are under way may take to end before a lost cluster is left."""


class WorkerDied(Exception):
    """The process that ran a task is gone: killed, out of memory, or its node was lost."""


class RayLost(Unavailable):
    """The head of the Ray cluster is gone, and with it every task; the executor joins it again when it is back."""

    kind = "workers-lost"


class Executor:
    """Runs functions of installed modules on Ray: a local one that it starts, or the cluster at ``address``.

    Start it from the main thread: what Ray starts ends with the thread that started it.
    """

    def __init__(
        self, num_cpus: int | None = None, address: str | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        """``environment`` is what the workers' processes find in theirs."""
        self._num_cpus = num_cpus
        self._address = address
        self._environment = {**_WORKER_ENVIRONMENT, **(environment or {})}
        self._remote: dict[Callable[..., Any], Any] = {}
        self._ray: Any = None
        self._head: tuple[str, int] | None = None
        """Where a cluster's head listens; a local Ray lives and dies with this process."""
        self._cpus = 0
        self._calls = threading.Condition()
        self._calling = 0
        self._lost = False
        self.shares = Shares()
        """Whose turn it is to begin a task."""

    def start(self) -> None:
        """Start or join Ray; raise ``Unavailable`` when it cannot be had."""
        os.environ.update(_RAY_ENVIRONMENT | ({} if self._address else _RAY_LOCAL))
        import ray

        self._ray = ray
        local: dict[str, Any] = {
            "num_cpus": self._num_cpus or len(os.sched_getaffinity(0)),
            "num_gpus": 0,
            "include_dashboard": False,
            "object_store_memory": 100 << 20,  # results are receipts
        }
        try:
            ray.init(
                address=self._address or "local",
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={"env_vars": self._environment},
                **({} if self._address else local),
            )
        except Exception as error:  # Ray raises whatever its parts raise
            where = self._address or "this machine"
            raise Unavailable(f"Ray cannot be started or joined on {where} ({error})", "see Ray's logs") from error
        self._head = _head(self._address, ray)
        self._cpus = self._count_cpus()

    def shutdown(self) -> None:
        """Leave Ray; a local one ends with all its processes."""
        if self._ray is not None:
            self._ray.shutdown()

    def healthy(self) -> bool:
        """Whether Ray answers."""
        try:
            with self._call():
                return bool(self._ray is not None and self._ray.is_initialized() and self._look())
        except Exception:  # a lost head shows in many ways
            return False

    @property
    def usable(self) -> bool:
        """Whether the cluster's head is not known to be lost."""
        return not self._lost

    @property
    def cpus(self) -> int:
        """CPUs of all nodes when they were last counted, at least 1."""
        return max(self._cpus, 1)

    def look_after(self) -> bool:
        """Count the CPUs again, and join a cluster again whose head was lost; return whether Ray can be used now.

        For the main thread, every few seconds.
        """
        if self._head is None or not (self._lost or self._gone()):
            return self.healthy()
        if not self._lost:
            self._lost = True
            log.error("the head of the Ray cluster at %s is gone, and all its tasks with it", self._address)
            self._leave()
        if not _answers(self._head):
            return False
        try:
            self.start()
        except Unavailable as error:
            log.warning("%s", error)
            return False
        self._lost = False
        log.info("joined the Ray cluster at %s again, with %d CPUs", self._address, self._cpus)
        return True

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Task:
        """Start ``function`` on a worker with one CPU. Ray never retries it: whoever waits decides."""
        with self._call():
            if function not in self._remote:
                self._remote[function] = self._ray.remote(num_cpus=1, max_retries=0)(function)
            return self._remote[function].remote(*args, **kwargs)

    def wait(self, tasks: Sequence[Task], timeout: float) -> list[Task]:
        """Return the tasks that have ended, after at most ``timeout`` seconds."""
        if not tasks:
            return []
        with self._call():
            return list(self._ray.wait(list(tasks), num_returns=1, timeout=timeout)[0])

    def result(self, task: Task) -> Any:
        """Return what an ended task returned, or raise what it raised; ``WorkerDied`` if its process is gone."""
        exceptions = self._ray.exceptions
        try:
            with self._call():
                return self._ray.get(task)
        except exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, PackhouseError):
                raise cause from None
            raise
        except (exceptions.WorkerCrashedError, exceptions.OutOfMemoryError, exceptions.NodeDiedError) as error:
            raise WorkerDied(str(error).splitlines()[0]) from None
        except exceptions.RayError as error:
            raise Unavailable(f"Ray lost a task ({str(error).splitlines()[0]})", "submit the job again") from None

    def cancel(self, tasks: Sequence[Task]) -> bool:
        """End tasks in some seconds; return whether a process had to be killed for it.

        Queued ones never start, running ones are interrupted at their next Python instruction. Ray loses the interrupt
        of a task that is only starting, and one in a long native call does not see it: those lose their process.
        """
        if not tasks:
            return False
        with suppress(RayLost), self._call():
            for task in tasks:
                self._ray.cancel(task)
            left = self._unfinished(tasks, PATIENCE_SECONDS)
            for task in left:
                self._ray.cancel(task, force=True)
            self._unfinished(left, PATIENCE_SECONDS)
            return bool(left)
        return True

    def _unfinished(self, tasks: Sequence[Task], timeout: float) -> list[Task]:
        if not tasks:
            return []
        return list(self._ray.wait(list(tasks), num_returns=len(tasks), timeout=timeout, fetch_local=False)[1])

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Use Ray, unless its head is lost; an error there that comes from its loss is ``RayLost``."""
        with self._calls:
            if self._lost:
                raise _lost(self._address)
            self._calling += 1
        try:
            yield
        except PackhouseError:
            raise
        except Exception:
            if self._lost or not self._reachable():
                raise _lost(self._address) from None
            raise
        finally:
            with self._calls:
                self._calling -= 1
                self._calls.notify_all()

    def _look(self) -> int:
        """Return the CPUs, unless the head does not answer: asked then, Ray would end this process."""
        if not self._reachable():
            return 0
        self._cpus = self._count_cpus()
        return self._cpus

    def _gone(self) -> bool:
        """Return whether the head is lost: it answers neither now nor in a moment, or has hung up."""
        if self._ray is None:
            return False
        return not self._ray.is_initialized() or not (self._reachable() or self._reachable())

    def _reachable(self) -> bool:
        return self._head is None or _answers(self._head)

    def _leave(self) -> None:
        """Leave a lost cluster once nobody uses it any more, and before Ray ends this process for its loss."""
        with self._calls:
            self._calls.wait_for(lambda: self._calling == 0, LEAVE_SECONDS)
        with suppress(Exception):
            self._ray.shutdown()
        self._remote.clear()

    def _count_cpus(self) -> int:
        return int(self._ray.cluster_resources().get("CPU", 0))


def _lost(address: str | None) -> RayLost:
    return RayLost(
        f"the head of the Ray cluster at {address} is gone", "wait: the service joins it again when it is back"
    )


def _head(address: str | None, ray: Any) -> tuple[str, int] | None:
    """Return host and port of a cluster's head; None for a local Ray."""
    if address is None:
        return None
    where = address if "://" in address else f"//{ray.get_runtime_context().gcs_address}"
    parts = urlsplit(where)
    return (parts.hostname or "", parts.port or 10001)


def _answers(head: tuple[str, int]) -> bool:
    """Return whether something listens there."""
    try:
        with socket.create_connection(head, ANSWER_SECONDS):
            return True
    except OSError:
        return False
