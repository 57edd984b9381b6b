"""PackedDataset: a torch data set that yields one rank's part of each step of a plan.

The state is a plan id and a step, so it is the same on every rank and holds for any world size, number of loader
workers and prefetch. Epochs are part of the plan; there is no ``set_epoch``.
"""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from packhouse.client.errors import Damaged, InvalidRequest, Mismatch
from packhouse.client.layouts import LAYOUTS, Batch
from packhouse.client.pack import PackBuilder
from packhouse.client.plan import PlanSource, check_slice, decode_steps
from packhouse.client.store import ReadStore

STEPS_A_REQUEST = 64
"""Steps of which a worker asks the plan at once: one round trip where the plan is remote."""


class PackedDataset(IterableDataset[Batch]):
    """The packs of ``rank`` of ``world`` in the steps of ``plan`` from ``start_step`` on, one item a step.

    ``plan`` is any ``PlanSource``, ``store`` where its shards lie. Give it to ``DataLoader(dataset, batch_size=None,
    num_workers=W)``: worker w of W builds every W-th step, so the loader yields each step once and in order. Where
    ``world`` does not divide a step's packs, empty packs make the ranks equal. Raises ``InvalidRequest`` for a rank,
    layout or step that is not there.
    """

    def __init__(
        self,
        plan: PlanSource,
        store: ReadStore,
        rank: int = 0,
        world: int = 1,
        layout: str = "internevo",
        start_step: int = 0,
    ) -> None:
        check_slice(plan.header, start_step, plan.header.steps, rank, world)
        if layout not in LAYOUTS:
            raise InvalidRequest(f"there is no layout {layout!r}", f"use one of {', '.join(LAYOUTS)}")
        self.plan = plan
        self.store = store
        self.rank = rank
        self.world = world
        self.layout = layout
        self.start_step = start_step
        self._next = start_step

    def __len__(self) -> int:
        """Steps from ``start_step`` to the plan's end: exactly what one pass yields."""
        return self.plan.header.steps - self.start_step

    def __iter__(self) -> Iterator[Batch]:
        """Yield the steps from ``start_step`` on in the shape of the layout; each call starts anew."""
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        header, builder = self.plan.header, PackBuilder(self.plan.header, self.store)
        for begin in range(self.start_step, header.steps, STEPS_A_REQUEST):
            end = min(begin + STEPS_A_REQUEST, header.steps)
            table = decode_steps(self.plan.slice(begin, end, self.rank, self.world))
            width = -(-header.packs_per_step // self.world)
            if len(table.step) != (end - begin) * width:
                raise Damaged(
                    f"steps {begin} to {end} of plan {header.id} came with {len(table.step)} packs and not "
                    f"{(end - begin) * width}",
                    "ask for them again",
                )
            for step in range(begin + (worker - (begin - self.start_step)) % workers, end, workers):
                first = (step - begin) * width
                batch = LAYOUTS[self.layout](builder.build(table.packs, first, first + width), step)
                self._next = step + 1
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"plan": id, "step": k}``, k the first step that was not yet yielded.

        That is what the trainer has had only while this object itself is iterated, so with ``num_workers=0``. With
        loader workers, which iterate copies of it, take ``{"plan": id, "step": data["step"] + 1}`` of the last batch
        that was used.
        """
        return {"plan": self.plan.header.id, "step": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the state's step; raise ``Mismatch`` for another plan's and ``InvalidRequest`` for no such step."""
        header = self.plan.header
        if state["plan"] != header.id:
            raise Mismatch(
                f"the state belongs to plan {state['plan']} and this data set reads plan {header.id}",
                "open the plan that the checkpoint names",
            )
        check_slice(header, state["step"], header.steps, self.rank, self.world)
        self.start_step = self._next = state["step"]
