"""Ray, and all that the pipeline needs of it: start, submit, wait, cancel. No other file knows it."""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from packhouse.client.errors import PackhouseError, Unavailable

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


class WorkerDied(Exception):
    """The process that ran a task is gone: killed, out of memory, or its node was lost."""


class Executor:
    """Runs functions of installed modules on Ray: a local one that it starts, or the cluster at ``address``.

    Start it from the main thread: what Ray starts ends with the thread that started it.
    """

    def __init__(self, num_cpus: int | None = None, address: str | None = None) -> None:
        self._num_cpus = num_cpus
        self._address = address
        self._remote: dict[Callable[..., Any], Any] = {}
        self._ray: Any = None

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
                runtime_env={"env_vars": _WORKER_ENVIRONMENT},
                **({} if self._address else local),
            )
        except Exception as error:  # Ray raises whatever its parts raise
            where = self._address or "this machine"
            raise Unavailable(f"Ray cannot be started or joined on {where} ({error})", "see Ray's logs") from error

    def shutdown(self) -> None:
        """Leave Ray; a local one ends with all its processes."""
        if self._ray is not None:
            self._ray.shutdown()

    def healthy(self) -> bool:
        """Whether Ray answers."""
        try:
            return bool(self._ray is not None and self._ray.is_initialized() and self._count_cpus())
        except Exception:  # a lost head shows in many ways
            return False

    @property
    def cpus(self) -> int:
        """CPUs of all nodes, at least 1."""
        return max(self._count_cpus(), 1)

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Task:
        """Start ``function`` on a worker with one CPU. Ray never retries it: whoever waits decides."""
        if function not in self._remote:
            self._remote[function] = self._ray.remote(num_cpus=1, max_retries=0)(function)
        return self._remote[function].remote(*args, **kwargs)

    def wait(self, tasks: Sequence[Task], timeout: float) -> list[Task]:
        """Return the tasks that have ended, after at most ``timeout`` seconds."""
        return list(self._ray.wait(list(tasks), num_returns=1, timeout=timeout)[0]) if tasks else []

    def result(self, task: Task) -> Any:
        """Return what an ended task returned, or raise what it raised; ``WorkerDied`` if its process is gone."""
        exceptions = self._ray.exceptions
        try:
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
        for task in tasks:
            self._ray.cancel(task)
        left = self._unfinished(tasks, PATIENCE_SECONDS)
        for task in left:
            self._ray.cancel(task, force=True)
        self._unfinished(left, PATIENCE_SECONDS)
        return bool(left)

    def _unfinished(self, tasks: Sequence[Task], timeout: float) -> list[Task]:
        if not tasks:
            return []
        return list(self._ray.wait(list(tasks), num_returns=len(tasks), timeout=timeout, fetch_local=False)[1])

    def _count_cpus(self) -> int:
        return int(self._ray.cluster_resources().get("CPU", 0))
