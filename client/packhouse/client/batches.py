"""Loader: a PackedDataset in a plain loop, read ahead by worker processes; its state is true at what was delivered."""

from collections.abc import Iterator
from os import PathLike
from typing import Any, Literal

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from packhouse.client.bundle import Bundle, bundle, unbundle
from packhouse.client.dataset import Delivery, PackedDataset, _worker
from packhouse.client.errors import Damaged, InvalidRequest, PackhouseError, Unavailable
from packhouse.client.handshake import check_state
from packhouse.client.ledger import Log
from packhouse.client.plan import check_slice

TOKEN_BYTES = 24
"""Bytes of a token on its way: id, label and position, int64 each."""


class _Failure:
    """An error of a worker, as a value: raised there, torch would keep of it no more than a text."""

    def __init__(self, error: PackhouseError) -> None:
        self.error = error


class _Deliveries(IterableDataset[Any]):
    """What a worker iterates: its steps, and its error where it has one."""

    def __init__(self, dataset: PackedDataset, begin: int, digests: bool) -> None:
        self._dataset = dataset
        self._begin = begin
        self._digests = digests

    def __iter__(self) -> Iterator[Delivery | _Failure]:
        worker, workers = _worker()
        apart = get_worker_info() is not None
        try:
            for one in self._dataset.deliveries(self._begin + worker, workers, self._digests):
                yield one._replace(batch=bundle(one.batch)) if apart else one
        except PackhouseError as error:
            yield _Failure(error)


class Loader:
    """The batches of a ``PackedDataset``, once for each ``for`` loop; ``loader`` makes one.

    The first loop begins at the state that was loaded, or at the data set's ``start_step``, where later ones begin.
    """

    def __init__(self, dataset: PackedDataset, timeout: float, log: Log | None, torch_options: dict[str, Any]) -> None:
        self.dataset = dataset
        self._timeout = timeout
        self._log = log
        self._torch_options = torch_options
        self._begin = self._next = dataset.start_step
        self._source: tuple[int, DataLoader[Any]] | None = None

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
        source = iter(self._data_loader(begin))
        for step in range(begin, plan.steps):
            try:
                item = self._await(source, step, begin)
            except Exception:
                self._close(source)
                raise
            self._next = step + 1
            if self._log is not None:
                self._log.delivered(step, item.slots, item.digests)
            yield unbundle(item.batch) if isinstance(item.batch, Bundle) else item.batch
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

    def _data_loader(self, begin: int) -> DataLoader[Any]:
        if self._source is None or self._source[0] != begin:
            deliveries = _Deliveries(self.dataset, begin, self._log is not None)
            options = {"batch_size": None, "collate_fn": _as_it_is, **self._torch_options}
            self._source = begin, DataLoader(deliveries, **options)
        return self._source[1]

    def _close(self, source: Iterator[Any]) -> None:
        """End the workers of a loop that has failed; the next loop starts new ones."""
        self._source = None
        # Left to the garbage collector, which may take the workers' queues first, this waits seconds for each.
        shut_down = getattr(source, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()

    def _await(self, source: Iterator[Any], step: int, begin: int) -> Delivery:
        plan, workers = self.dataset.plan.header.id, self._torch_options["num_workers"]
        place = f"step {step} of plan {plan}"
        try:
            item = next(source)
        except StopIteration:
            raise Damaged(f"the loader's workers ended before {place}", "report it") from None
        except RuntimeError as error:
            if str(error).startswith("DataLoader timed out"):
                fact = f"{place} did not come from loader worker {(step - begin) % workers} of {workers}"
                remedy = "look for a store or service that does not answer, or raise timeout"
                raise Unavailable(f"{fact} within {self._timeout:g} s", remedy) from error
            if str(error).startswith("DataLoader worker"):
                fact = f"a loader worker died before {place} came ({str(error).splitlines()[0]})"
                raise Unavailable(fact, "look for a lack of memory, then go on from the last state") from error
            raise
        if isinstance(item, _Failure):
            try:
                raise item.error
            finally:
                del item  # or the error would lead to itself, and stay with all that this loop holds
        if item.step != step:
            raise Damaged(f"{place} was due and step {item.step} came", "report it")
        delivered: Delivery = item
        return delivered


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

    At most ``prefetch_bytes`` of packs, at 24 bytes a token, wait in all workers together. Rows of layout ``padded``,
    and what a function returns, may be larger than their packs: take less for them. A batch that does not come
    within ``timeout`` seconds is an error that names it. ``log`` is this rank's ledger, a file to append to; see
    ``packhouse plan audit``. Raises ``InvalidRequest`` where ``prefetch_bytes`` does not hold a step for each worker.
    """
    options: dict[str, Any] = {"num_workers": workers, "pin_memory": pin_memory}
    if workers:
        step = dataset.packs_per_rank * dataset.plan.header.spec.pack_length * TOKEN_BYTES
        ahead = prefetch_bytes // (step * workers)
        if ahead < 1:
            raise InvalidRequest(
                f"prefetch_bytes {prefetch_bytes:,} does not hold a step of {step:,} bytes for each of {workers}",
                "raise it, or take fewer workers",
            )
        options |= {"prefetch_factor": min(ahead, 64), "persistent_workers": True, "timeout": timeout}
        options["multiprocessing_context"] = method
    return Loader(dataset, timeout, None if log is None else Log(log), options)


def _as_it_is(item: Any) -> Any:
    return item
