"""A pool of processes in which distributed cases run, started once per session; see the fixture `pool`.

A case is a function of a test module and plain arguments. Each run has a world of its own: its process group is made
before and destroyed after it, so nothing is left over for the next.
"""

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT = timedelta(seconds=60)


class Pool:
    """Up to `size` processes; a process that fails is replaced."""

    def __init__(self, size: int, folder: Path) -> None:
        self._context = multiprocessing.get_context("forkserver")
        # Imported once in the server that the processes are forked from.
        self._context.set_forkserver_preload(["torch.distributed", "packhouse.trainer", "pytest"])
        self._folder, self._runs = folder, 0
        self._workers: list[tuple[Any, Connection]] = [self._start() for _ in range(size)]

    def run(self, world: int, case: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `case(*args)` on every rank of a world; returns what each rank returned, or raises the first failure."""
        answers = self._answers(world, case, *args)
        failures = [text for ended, text in answers if not ended]
        if failures:
            # Ranks that lost a peer fail as well: the failure that says most is the one of an assertion.
            raise AssertionError(next((text for text in failures if "AssertionError" in text), failures[0]))
        return [value for _, value in answers]

    def failures(self, world: int, case: Callable[..., Any], *args: Any) -> list[str]:
        """As `run`, of a case that must fail on every rank; returns what each rank failed with."""
        answers = self._answers(world, case, *args)
        assert not any(ended for ended, _ in answers), answers
        return [text for _, text in answers]

    def _answers(self, world: int, case: Callable[..., Any], *args: Any) -> list[tuple[bool, Any]]:
        self._runs += 1
        for rank in range(world):
            self._workers[rank][1].send((case, args, rank, world, str(self._folder / f"run-{self._runs}")))
        return [self._receive(rank) for rank in range(world)]

    def close(self) -> None:
        for process, _ in self._workers:
            process.terminate()
            process.join()

    def _start(self) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _receive(self, rank: int) -> tuple[bool, Any]:
        process, connection = self._workers[rank]
        try:
            if not connection.poll(2 * TIMEOUT.total_seconds()):
                raise EOFError("no answer")
            answer: tuple[bool, Any] = connection.recv()
            return answer
        except EOFError as error:
            process.kill()
            process.join()
            self._workers[rank] = self._start()
            return False, f"rank {rank} ended: {error}, exit code {process.exitcode}"


def serve(connection: Connection) -> None:
    """Run cases until the other end is closed."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    while True:
        try:
            case, args, rank, world, store = connection.recv()
        except EOFError:
            return
        try:
            files = FileStore(store, world)
            dist.init_process_group("gloo", store=files, rank=rank, world_size=world, timeout=TIMEOUT)
            result = True, case(*args)
        except BaseException:
            result = False, f"rank {rank} of {world}:\n{traceback.format_exc()}"
        finally:
            if not result[0]:
                gc.collect()  # a model is a cycle, and holds its groups: open connections, on which the others wait
            if dist.is_initialized():
                dist.destroy_process_group()
        connection.send(result)
