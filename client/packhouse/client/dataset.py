"""PackedDataset: a torch data set that yields one rank's part of each step of a plan.

The state is a plan id and a step, so it is the same on every rank and holds for any world size, number of loader
workers and prefetch. Epochs are part of the plan; there is no ``set_epoch``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from packhouse.client.errors import Damaged, Mismatch, PackhouseError
from packhouse.client.extra import Runtime, prepared
from packhouse.client.handshake import check_state, check_tokenizer, check_vocabulary
from packhouse.client.kernel import KernelName
from packhouse.client.layouts import Layout, LayoutName, make_layout
from packhouse.client.ledger import pack_digest
from packhouse.client.pack import PADDING_ID, PackBuilder
from packhouse.client.plan import PlanSource, StepTable, check_slice, decode_steps
from packhouse.client.store import ReadStore
from packhouse.client.xtuner import CollateFn

STEPS_A_REQUEST = 64
"""Steps of which a worker asks the plan at once: one round trip where the plan is remote."""


class Delivery(NamedTuple):
    """A step as a loader worker hands it on."""

    step: int
    slots: list[int]
    """Places in the step of the packs that are not there only to keep the ranks equal."""
    digests: list[str]
    """Digests of those packs, for a ledger; else empty."""
    batch: Any


@dataclass(frozen=True)
class Options:
    """How packs are built and shaped, beyond the layout's name."""

    pad_id: int = PADDING_ID
    """Id on padding."""
    collate_fn: CollateFn | None = None
    """A collator in place of XTuner's, for layout xtuner."""
    kernel: KernelName = "auto"
    """What builds the packs; see ``PackBuilder``."""
    tokenizer: Any = None
    """The trainer's tokenizer, or its digest, to be checked against the datasets'."""
    vocab_size: int | None = None
    """Ids that the model knows, to be checked against the datasets'."""
    runtime: Runtime | None = None
    """What makes of a sample's extra columns what the batch needs, such as ``Pictures``: it is called for each segment,
    in the process that builds the batch, and its result is put beside the columns."""


class PackedDataset(IterableDataset[Any]):
    """The packs of ``rank`` of ``world`` in the steps of ``plan`` from ``start_step`` on, one item a step.

    ``plan`` is any ``PlanSource``, ``store`` where its shards lie, ``layout`` a name or a function of a step's packs
    and number. Give it to ``packhouse.client.loader``, or to ``DataLoader(dataset, batch_size=None, num_workers=W)``:
    worker w of W builds every W-th step, so the loader yields each step once and in order. Where ``world`` does not
    divide a step's packs, empty packs make the ranks equal. Raises ``InvalidRequest`` for a rank, layout or step that
    is not there, and ``Mismatch`` for a tokenizer or vocabulary that is not the data's.
    """

    def __init__(
        self,
        plan: PlanSource,
        store: ReadStore,
        rank: int = 0,
        world: int = 1,
        layout: LayoutName | Layout = "internevo",
        start_step: int = 0,
        options: Options | None = None,
    ) -> None:
        header, options = plan.header, options or Options()
        check_slice(header, start_step, header.steps, rank, world)
        if options.tokenizer is not None:
            check_tokenizer(header, store, options.tokenizer)
        if options.vocab_size is not None:
            check_vocabulary(header, options.vocab_size)
        self.plan = plan
        self.store = store
        self.rank = rank
        self.world = world
        self.start_step = start_step
        self.pad_id = options.pad_id
        self.kernel: KernelName = options.kernel
        runtime: Any = options.runtime
        if hasattr(runtime, "state"):
            runtime.state = "runtime"
        self.runtime = options.runtime
        self.layout = make_layout(layout, header.spec, options.pad_id, options.collate_fn)
        self.is_quick = not (callable(layout) or options.collate_fn or options.runtime)
        """Whether a batch takes no code but packhouse's own, and so microseconds: workers hand on several at once."""
        self._next: int | None = None
        self._own: int | None = None

    def __len__(self) -> int:
        """Steps from ``start_step`` to the plan's end: exactly what one pass yields."""
        return self.plan.header.steps - self.start_step

    @property
    def packs_per_rank(self) -> int:
        """Packs of a step that this rank has, empty ones included."""
        return -(-self.plan.header.packs_per_step // self.world)

    def __iter__(self) -> Iterator[Any]:
        """Yield the steps from ``start_step`` on in the shape of the layout; each call starts anew."""
        worker, workers = _worker()
        first = self.start_step + worker if self._own is None else self._own
        self._own, self._next = None, first
        for delivery in self.deliveries(first, workers):
            self._next = delivery.step + workers
            yield delivery.batch

    def deliveries(self, first: int, stride: int, digests: bool = False, run: int = 1) -> Iterator[Delivery]:
        """Yield, from ``first`` on, ``run`` steps of every ``stride * run``; raise errors that name the step."""
        builder = PackBuilder(self.plan.header, self.store, pad_id=self.pad_id, kernel=self.kernel)
        width = self.packs_per_rank
        windows = self._windows(first)
        window = next(windows, None)
        while window is not None:
            following = None
            begin, table = window
            steps = range(begin, begin + len(table.step) // width)
            own = [step for step in steps if (step - first) % (stride * run) < run]
            self._fetch_ahead(builder, table)
            for step in own:
                with naming(step, self.plan.header.id):
                    delivery = self._deliver(builder, table, step, (step - begin) * width, digests)
                yield delivery
                if following is None:
                    # Now, and not at the window's end, so that its shards are under way by then.
                    following = next(windows, None)
                    if following is not None:
                        self._fetch_ahead(builder, following[1])
            window = following or next(windows, None)

    def _deliver(self, builder: PackBuilder, table: StepTable, step: int, first: int, digests: bool) -> Delivery:
        last = first + self.packs_per_rank
        packs = builder.build(table.packs, first, last)
        if self.runtime is not None:
            packs = [prepared(pack, self.runtime) for pack in packs]
        slots = table.slot[first:last].tolist()
        real = [(slot, pack) for slot, pack in zip(slots, packs, strict=True) if slot >= 0]
        made = [pack_digest(pack) for _, pack in real] if digests else []
        return Delivery(step, [slot for slot, _ in real], made, self.layout(packs, step))

    def _windows(self, first: int) -> Iterator[tuple[int, StepTable]]:
        """Yield this rank's packs in windows of steps, and the first step of each."""
        header, width = self.plan.header, self.packs_per_rank
        for begin in range(first, header.steps, STEPS_A_REQUEST):
            end = min(begin + STEPS_A_REQUEST, header.steps)
            with naming(begin, header.id):
                table = decode_steps(self.plan.slice(begin, end, self.rank, self.world))
                if len(table.step) != (end - begin) * width:
                    raise Damaged(
                        f"{len(table.step)} packs came for steps {begin} to {end}, and not {(end - begin) * width}",
                        "ask for them again",
                    )
            yield begin, table

    def _fetch_ahead(self, builder: PackBuilder, table: StepTable) -> None:
        """Tell a store that fetches which shards come next, in the plan's order."""
        fetch = getattr(self.store, "fetch_ahead", None)
        if fetch is None:
            return
        shards, _ = builder.index.locate(table.packs.sample)
        seen, at = np.unique(shards, return_index=True)
        fetch([builder.index.receipts[number] for number in seen[np.argsort(at)].tolist()])

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"plan": id, "step": k}``, k the first step that was not yet yielded.

        That is what the trainer has had while this object itself is iterated; with loader workers, which iterate
        copies of it, take the state of a ``Loader``. In a worker the state is that worker's own, marked by its number,
        and only good for it: that is what torchdata's ``StatefulDataLoader`` keeps.
        """
        worker, workers = _worker()
        step = self.start_step + worker if self._next is None else self._next
        state: dict[str, Any] = {"plan": self.plan.header.id, "step": step}
        return state if get_worker_info() is None else {**state, "worker": [worker, workers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the state's step; raise ``Mismatch`` for another plan's and ``InvalidRequest`` for no such step."""
        step = check_state(self.plan, self.store, state)
        if "worker" in state:
            if get_worker_info() is None or state["worker"] != list(_worker()):
                worker, workers = state["worker"]
                raise Mismatch(
                    f"the state is that of worker {worker} of {workers} alone",
                    "resume with as many workers, or from the state of a Loader, which holds for any number",
                )
            self._own = self._next = step
            return
        check_slice(self.plan.header, step, self.plan.header.steps, self.rank, self.world)
        self.start_step, self._next = step, None


@contextmanager
def naming(step: int, plan_id: str) -> Iterator[None]:
    """Add the step to what an error says; errors that are not packhouse's own get a note."""
    try:
        yield
    except PackhouseError as error:
        raise type(error)(f"step {step} of plan {plan_id}: {error.detail}", error.remedy) from error
    except GeneratorExit:
        raise
    except Exception as error:
        error.add_note(f"while step {step} of plan {plan_id} was built")
        raise


def _worker() -> tuple[int, int]:
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)
