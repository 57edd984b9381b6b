"""Caching jobs in processes that tests kill: a program that has everything loaded, and forks for each job.

No Ray: blocks are encoded in the job's own process, one after the other, so that it is known what dies.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from packhouse.client import faults
from packhouse.client.digest import digest_bytes
from packhouse.client.errors import PackhouseError
from packhouse.client.format import read_manifest
from packhouse.client.store import Store, store_at
from packhouse.client.wire import JobSpec, Progress
from packhouse.worker import pipeline, recipe, work
from packhouse.worker.lookup import note_audit_failed
from packhouse.worker.shares import Shares

DATA = "shards/??/" + "?" * 32 + ".arrow"
META = "shards/*.meta.arrow"
REJECTED = "shards/*.rejected.jsonl"
RECEIPT = "shards/??/" + "?" * 32 + ".json"
MANIFEST = "datasets/*.json"
TOKENIZER = "tokenizers/*"


class Inline:
    """Runs tasks in this process when they are waited for; calls ``after`` with how many have ended."""

    cpus = 1

    def __init__(self, after: Callable[[int], None] = lambda _: None) -> None:
        self._after = after
        self._ended = 0
        self.shares = Shares()

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Any]:
        return lambda: function(*args, **kwargs)

    def wait(self, tasks: Sequence[Callable[[], Any]], timeout: float) -> list[Callable[[], Any]]:
        return list(tasks[:1])

    def result(self, task: Callable[[], Any]) -> Any:
        value = task()
        self._ended += 1
        self._after(self._ended)
        return value

    def cancel(self, tasks: Sequence[Callable[[], Any]]) -> bool:
        return False


class Index(dict[str, bytes]):
    """What a service would keep in its database."""

    def get(self, keys: list[str]) -> dict[str, bytes]:  # type: ignore[override]
        return {key: self[key] for key in keys if key in self}

    def put(self, items: dict[str, bytes]) -> None:
        self.update(items)


@dataclass(frozen=True)
class Ran:
    """What a job left."""

    dataset: str
    rows: int
    hits: int
    misses: dict[str, int]


def run_job(store: Store, spec: JobSpec, after: Callable[[int], None] = lambda _: None) -> Ran:
    """Do a caching job in this process."""
    told: list[Progress] = []
    resolved, index = recipe.resolve(spec, store), Index()
    note_audit_failed(resolved.recipe_, ["engine"], index)  # the slow engine is loaded at once, and needs no proof
    outcome = pipeline.run(
        spec,
        resolved,
        store=store,
        index=index,
        executor=cast(pipeline.Executor, Inline(after)),
        on_progress=told.append,
        cancelled=threading.Event(),
    )
    rows = read_manifest(store, outcome.dataset_id).rows
    return Ran(outcome.dataset_id, rows, told[-1].hits, dict(told[-1].misses))


def digests(store: Store) -> dict[str, str]:
    """Return the digest of every file that a job leaves in a store, by key."""
    keys = [key for folder in ("shards", "datasets", "tokenizers") for key in store.list(folder)]
    return {key: digest_bytes(store.open(key)) for key in keys}


class Jobs:
    """The program, as the tests hold it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(
        self, store: str, spec: JobSpec, faults_file: Path | None = None, kill_after: float | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Do a job in a new process, killed after ``kill_after`` seconds.

        Returns its wait status as ``waitstatus_to_exitcode`` has it, and what it told.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order: dict[str, Any] = {"store": store, "spec": spec.model_dump(mode="json"), "kill_after": kill_after}
        order["faults"] = faults_file and str(faults_file)
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        code, told = json.loads(self._process.stdout.readline())
        return code, told


@contextmanager
def job_processes() -> Iterator[Jobs]:
    """Run the program until the context ends."""
    command = [sys.executable, "-m", "tests.worker.crash"]
    root = Path(__file__).parents[2]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, env=environment
    ) as process:
        yield Jobs(process)
        assert process.stdin is not None
        process.stdin.close()


def _serve() -> None:
    warm = False
    for line in sys.stdin:
        order = json.loads(line)
        if not warm:
            with tempfile.TemporaryDirectory() as folder:  # what a job imports, its processes have then imported
                run_job(store_at(folder), JobSpec.model_validate(order["spec"]))
            work._TOOLKITS.clear()
            warm = True
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _child(order, write)
        os.close(write)
        if order["kill_after"] is not None and not select.select([read], [], [], order["kill_after"])[0]:
            os.kill(pid, signal.SIGKILL)
        with open(read) as told:
            text = told.read()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps([code, json.loads(text or "{}")]), flush=True)


def _child(order: dict[str, Any], write: int) -> None:
    """Do a job as a service does that has just started; tell how it ended, and end."""
    code, told = 0, {}
    try:
        store = store_at(order["store"])
        store.sweep()
        faults.use(order["faults"] and Path(order["faults"]))
        ran = run_job(store, JobSpec.model_validate(order["spec"]))
        told = {"dataset": ran.dataset, "rows": ran.rows, "hits": ran.hits}
    except PackhouseError as error:
        code, told = 1, {"error": str(error)}
    except BaseException:
        traceback.print_exc()
        code = 2
    os.write(write, json.dumps(told).encode())
    os._exit(code)


if __name__ == "__main__":
    _serve()
