"""Loader: a PackedDataset in a plain loop, read ahead by worker processes; its state is true at what was delivered."""

import time
import weakref
from collections.abc import Iterator
from os import PathLike
from typing import Any, Literal, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from packhouse.client.bundle import Bundle, bundle, unbundle
from packhouse.client.dataset import Delivery, PackedDataset, _worker
from packhouse.client.errors import Damaged, InvalidRequest, PackhouseError, Unavailable
from packhouse.client.gauge import Gauge
from packhouse.client.handshake import check_state
from packhouse.client.ledger import Log
from packhouse.client.plan import check_slice

TOKEN_BYTES = 24
"""Least bytes of a token on its way: id, label and position, int64 each."""
HAND_OVER = 1 << 20
"""Bytes that a worker hands on at once, at least where steps are quick: every hand-over costs half a millisecond."""
MOST_STEPS = 16
"""Steps that a worker hands on at once, at most: the first of them waits for the last."""
MOST_AHEAD = 64
"""Hand-overs that a worker is ahead, at most."""
START = 300.0
"""Seconds that a worker may take to start, at least: it imports torch, and many may start on one busy machine."""
LOOK = 1.0
"""Seconds between two looks at a worker that is waited for."""


class _HandOver(NamedTuple):
    """What a worker hands on at once."""

    steps: list[Delivery]
    """Their batches are in ``batches`` where they come from another process."""
    batches: Bundle | None
    error: PackhouseError | None
    """What ended the worker; a value, because of what is raised there torch would keep no more than a text."""


class _Deliveries(IterableDataset[Any]):
    """What a worker iterates: its steps, several at once, and its error where it has one."""

    def __init__(self, dataset: PackedDataset, begin: int, digests: bool, run: int, gauge: Gauge | None) -> None:
        self._dataset = dataset
        self._begin = begin
        self._digests = digests
        self._run = run
        self._gauge = gauge

    def __iter__(self) -> Iterator[_HandOver]:
        if self._gauge is None:
            yield from self._hand_overs(0, 1)
            return
        worker, workers = _worker()
        making = self._gauge.start(worker)
        source = self._hand_overs(worker, workers)
        making.await_room()
        for one in source:
            batches = bundle([step.batch for step in one.steps])
            making.add(batches.nbytes)
            yield _HandOver([step._replace(batch=None) for step in one.steps], batches, one.error)
            making.await_room()

    def _hand_overs(self, worker: int, workers: int) -> Iterator[_HandOver]:
        run = self._run
        first = self._begin + worker * run
        steps: list[Delivery] = []
        try:
            for one in self._dataset.deliveries(first, workers, self._digests, run):
                steps.append(one)
                if (one.step - first) % run == run - 1:
                    yield _HandOver(steps, None, None)
                    steps = []
        except PackhouseError as error:
            yield _HandOver(steps, None, error)
            return
        if steps:
            yield _HandOver(steps, None, None)


class Loader:
    """The batches of a ``PackedDataset``, once for each ``for`` loop; ``loader`` makes one.

    The first loop begins at the state that was loaded, or at the data set's ``start_step``, where later ones begin.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        *,
        timeout: float,
        log: Log | None,
        run: int,
        gauge: Gauge | None,
        torch_options: dict[str, Any],
    ) -> None:
        self.dataset = dataset
        self._timeout = timeout
        self._log = log
        self._run = run
        self._gauge = gauge
        self._torch_options = torch_options
        self._begin = self._next = dataset.start_step
        self._source: tuple[int, DataLoader[Any]] | None = None
        if gauge is not None:
            # A worker that waits for room must not keep the end of its loader waiting.
            weakref.finalize(self, gauge.begin)

    def __len__(self) -> int:
        """Steps of the loop that begins next."""
        return self.dataset.plan.header.steps - self._begin

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches in order.

        Raises what a worker met, with the step named, and ``Unavailable`` for a worker that died or did not deliver in
        time.
        """
        plan = self.dataset.plan.header
        begin, self._begin = self._begin, self.dataset.start_step
        self._next = begin
        if self._log is not None:
            self._log.begin(plan.id, begin, self.dataset.rank, self.dataset.world)
        if self._gauge is not None:
            self._gauge.begin()
        source = iter(self._data_loader(begin))
        while self._next < plan.steps:
            try:
                item = self._await(source, (self._next - begin) // self._run)
            except Exception:
                self._close(source)
                raise
            yield from self._deliver(item)
            if item.error is not None:
                self._close(source)
                try:
                    raise item.error
                finally:
                    del item  # or the error would lead to itself, and stay with all that this loop holds
        for _ in source:
            raise Damaged(f"more steps came than plan {plan.id} has", "report it")

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"plan": id, "step": k}``, k the first step that this process was not yet handed."""
        return {"plan": self.dataset.plan.header.id, "step": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next loop at the state's step; raises as ``PackedDataset.load_state_dict`` does."""
        header = self.dataset.plan.header
        step = check_state(self.dataset.plan, self.dataset.store, state)
        if "worker" in state:
            raise InvalidRequest("the state is that of one worker", "load the one that a Loader gave")
        check_slice(header, step, header.steps, self.dataset.rank, self.dataset.world)
        self._begin = self._next = step

    def waiting(self) -> list[int]:
        """Return the bytes of batches that wait in each worker."""
        return [] if self._gauge is None else self._gauge.waiting()

    def _data_loader(self, begin: int) -> DataLoader[Any]:
        if self._source is None or self._source[0] != begin:
            deliveries = _Deliveries(self.dataset, begin, self._log is not None, self._run, self._gauge)
            options = {"batch_size": None, "collate_fn": _as_it_is, **self._torch_options}
            self._source = begin, DataLoader(deliveries, **options)
        return self._source[1]

    def _close(self, source: Iterator[Any]) -> None:
        """End the workers of a loop that has failed; the next loop starts new ones."""
        self._source = None
        if self._gauge is not None:
            self._gauge.begin()
        # Left to the garbage collector, which may take the workers' queues first, this waits seconds for each.
        shut_down = getattr(source, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()

    def _deliver(self, item: _HandOver) -> Iterator[Any]:
        batches = [step.batch for step in item.steps] if item.batches is None else unbundle(item.batches)
        for step, batch in zip(item.steps, batches, strict=True):
            if step.step != self._next:
                fact = f"step {self._next} of plan {self.dataset.plan.header.id} was due and step {step.step} came"
                raise Damaged(fact, "report it")
            self._next = step.step + 1
            if self._log is not None:
                self._log.delivered(step.step, step.slots, step.digests)
            yield batch

    def _await(self, source: Iterator[Any], turn: int) -> _HandOver:
        """Return what the worker whose turn it is hands on."""
        place = f"step {self._next} of plan {self.dataset.plan.header.id}"
        try:
            if self._gauge is None:
                return next(source)  # type: ignore[no-any-return]
            worker = turn % int(self._torch_options["num_workers"])
            item: _HandOver = self._within(source, worker, place)
            if item.batches is not None:
                self._gauge.take(worker, item.batches.nbytes)
            return item
        except StopIteration:
            raise Damaged(f"the loader's workers ended before {place}", "report it") from None
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            fact = f"a loader worker died before {place} came ({str(error).splitlines()[0]})"
            raise Unavailable(fact, "look for a lack of memory, then go on from the last state") from error

    def _within(self, source: Iterator[Any], worker: int, place: str) -> Any:
        """Return the next item; the time that a worker has for it begins when it has started."""
        assert self._gauge is not None
        begun, started = time.monotonic(), self._gauge.has_started(worker)
        name = f"loader worker {worker} of {self._torch_options['num_workers']}"
        while True:
            try:
                return next(source)
            except RuntimeError as error:
                if not str(error).startswith("DataLoader timed out"):
                    raise
                waited = time.monotonic() - begun
                if not started and self._gauge.has_started(worker):
                    begun, started = time.monotonic(), True
                elif started and waited >= self._timeout:
                    fact = f"{place} did not come from {name} within {self._timeout:g} s"
                    remedy = "look for a store or service that does not answer, or raise timeout"
                    raise Unavailable(fact, remedy) from error
                elif waited >= max(START, self._timeout):
                    fact = f"{name}, which {place} is to come from, did not start within {waited:.0f} s"
                    raise Unavailable(fact, "look for what keeps this machine busy, or raise timeout") from error


def loader(
    dataset: PackedDataset,
    *,
    workers: int = 2,
    prefetch_bytes: int = 1 << 30,
    pin_memory: bool = False,
    method: Literal["fork", "spawn", "forkserver"] | None = None,
    timeout: float = 300.0,
    log: str | PathLike[str] | None = None,
) -> Loader:
    """Return a ``Loader`` whose ``workers`` processes, which stay for later loops, read ahead; 0 reads in this one.

    At most ``prefetch_bytes`` of batches, as large as their layout makes them, wait in all workers together; each may
    have one, however large, and one that is larger than all before it is known for that when it is made. A batch that
    does not come within ``timeout`` seconds of a worker that has started is an error that names it. ``log`` is this
    rank's ledger, a file to append to; see ``packhouse plan audit``. Raises ``InvalidRequest`` where
    ``prefetch_bytes`` does not hold a step's packs, at 24 bytes a token, for each worker.
    """
    written = None if log is None else Log(log)
    options: dict[str, Any] = {"num_workers": workers, "pin_memory": pin_memory}
    if not workers:
        return Loader(dataset, timeout=timeout, log=written, run=1, gauge=None, torch_options=options)
    gauge = Gauge(workers, prefetch_bytes)
    step = dataset.packs_per_rank * dataset.plan.header.spec.pack_length * TOKEN_BYTES
    if gauge.share < step:
        raise InvalidRequest(
            f"prefetch_bytes {prefetch_bytes:,} does not hold a step of {step:,} bytes for each of {workers}",
            "raise it, or take fewer workers",
        )
    # Half of a share, so that one hand-over can wait while the next is made.
    run = max(1, min(HAND_OVER // step, gauge.share // (2 * step), MOST_STEPS)) if dataset.is_quick else 1
    options |= {"prefetch_factor": MOST_AHEAD, "persistent_workers": True, "timeout": min(timeout, LOOK)}
    options["multiprocessing_context"] = method
    return Loader(dataset, timeout=timeout, log=written, run=run, gauge=gauge, torch_options=options)


def _as_it_is(item: Any) -> Any:
    return item
