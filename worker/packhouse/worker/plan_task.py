"""Where a plan is built: a small one here and at once, a large one on a worker, which has memory and a CPU for it."""

from contextlib import suppress

from packhouse.client.errors import Unavailable
from packhouse.client.store import Store
from packhouse.client.wire_plans import Plan, PlanSpec
from packhouse.worker.executor import Executor, WorkerDied
from packhouse.worker.plan_check import TooManyDraws, check_spec
from packhouse.worker.plan_inputs import read_manifests
from packhouse.worker.plans import build_plan

SMALL = 1 << 20
"""Draws up to which a plan takes less time than waiting for a worker may."""


def build_where_it_fits(executor: object, store: Store, spec: PlanSpec, *, write: bool, small: int = SMALL) -> Plan:
    """Return the plan of ``build_plan``; one of more than ``small`` draws is built on ``executor``, where it is one.

    Raises what ``build_plan`` raises, and ``Unavailable`` if the worker dies: a killed one has stored no plan.
    """
    check_spec(spec)
    rows = sum(manifest.rows for manifest in read_manifests(store, spec))
    if not isinstance(executor, Executor):
        return build_plan(store, spec, write=write)
    if rows * spec.epochs <= small:
        with suppress(TooManyDraws):  # weights tell how many there are once the lengths are read
            return build_plan(store, spec, write=write, most=small)
    task = executor.submit(build_plan, store, spec, write=write)
    while not executor.wait([task], timeout=60.0):
        pass
    try:
        plan: Plan = executor.result(task)
    except WorkerDied as error:
        raise Unavailable(
            f"the worker that built the plan died ({error})", "ask again, or give it more memory"
        ) from None
    return plan
