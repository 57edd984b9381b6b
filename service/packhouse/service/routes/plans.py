"""Routes of plans: build, look, and read the packs of a rank."""

import logging
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Annotated

import pyarrow as pa
from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import Field

from packhouse.client.digest import canonical_json
from packhouse.client.errors import Damaged, NotFound
from packhouse.client.plan import METADATA_KEY, STEPS_SCHEMA, PlanFile, check_slice, plan_id, plan_path
from packhouse.client.wire import Wire
from packhouse.client.wire_plans import Plan, PlanReport, PlanSpec
from packhouse.service import arrow
from packhouse.service.json_body import JsonRoute
from packhouse.service.open_plans import Opener, OpenPlans
from packhouse.service.openapi import also, gives, told
from packhouse.service.parts import Given, Parts
from packhouse.service.routes.params import NO_QUERY, ContentId, FromCursor, next_page

router = APIRouter(prefix="/v1/plans", tags=["plans"], route_class=JsonRoute)
log = logging.getLogger(__name__)

BATCH_SEGMENTS = 1 << 15
"""Segments of one batch of an Arrow stream, about."""
GONE = told(404, 410, 500)
"""A plan or a dataset that is not there, is not any more, or is damaged."""


class BuildQuery(Wire):
    """How to build a plan."""

    dry_run: bool = False
    """Report, and store nothing."""


class StepsQuery(Wire):
    """Which packs to read."""

    start: Annotated[int, Field(ge=0)] = 0
    stop: Annotated[int, Field(ge=0)] | None = None
    """Step after the last one; None reads to the end."""
    rank: Annotated[int, Field(ge=0)] = 0
    world: Annotated[int, Field(ge=1)] = 1
    header: bool = True
    """Whether the schema carries the plan's header, which names every shard."""


def _wanted(plan_id: ContentId, parts: Given, open_plan: Opener) -> PlanFile:
    try:
        plan = open_plan(plan_id)
    except NotFound:
        parts.space.inventory.check_plan(plan_id)
        raise
    parts.space.used("plans", plan_id)
    return plan


Wanted = Annotated[PlanFile, Depends(_wanted)]
"""The plan that a path names; that it was asked for is remembered."""


@router.post(
    "",
    status_code=201,
    responses=also(200, Plan, "The plan was there, or this is a dry run") | GONE | told(413),
)
async def build(
    spec: PlanSpec, query: Annotated[BuildQuery, Query()], parts: Given, open_plan: Opener, response: Response
) -> Plan:
    """Build a plan and return its report; the same request always gives the same plan."""
    from packhouse.worker.plan_task import build_where_it_fits  # the worker takes seconds to import

    begun = time.perf_counter()
    known = await run_sync(parts.store.size, plan_path(plan_id(spec))) is not None
    await run_sync(_need, parts, spec)
    plan = await run_sync(partial(build_where_it_fits, parts.executor, parts.store, spec, write=not query.dry_run))
    result = "dry_run" if query.dry_run else "known" if known else "built"
    parts.metrics.planned(plan, time.perf_counter() - begun, result=result)
    open_plan.forget()  # a plan whose shards were rebuilt since is written again
    response.status_code = 200 if known or query.dry_run else 201
    if plan.stored:
        await run_sync(parts.space.plan_built, plan.id, spec.datasets)
        response.headers["location"] = f"/v1/plans/{plan.id}"
    return plan


@router.get("")
def index(query: FromCursor, parts: Given, open_plan: Opener, request: Request, response: Response) -> list[Plan]:
    """List plans by id; the Link header leads on."""
    keys = (key for key in parts.store.list("plans") if key.endswith(".arrow"))
    ids = (key.removeprefix("plans/").removesuffix(".arrow") for key in keys)
    page = list(islice((one for one in ids if query.after is None or one > query.after), query.limit))
    if len(page) == query.limit:
        response.headers.update(next_page(request, after=page[-1]))
    return [plan for one in page if (plan := _readable(open_plan, one)) is not None]


@router.get("/{plan_id}", dependencies=[NO_QUERY], responses=GONE)
def show(plan: Wanted) -> Plan:
    """Return one plan."""
    return _describe(plan)


@router.get("/{plan_id}/report", dependencies=[NO_QUERY], responses=GONE)
def report(plan: Wanted) -> PlanReport:
    """Return how good a plan is."""
    return plan.report


@router.get("/{plan_id}/steps", response_class=Response, responses=gives(arrow.MEDIA_TYPE, empty=(304,)) | GONE)
async def steps(
    plan_id: ContentId, query: Annotated[StepsQuery, Query()], parts: Given, open_plan: Opener, request: Request
) -> Response:
    """Return the packs of a rank as an Arrow stream; over all ranks they are the steps, in order."""
    plan = await run_sync(_wanted, plan_id, parts, open_plan)  # not before the query is known to be right
    stop = plan.steps if query.stop is None else query.stop
    check_slice(plan.header, query.start, stop, query.rank, query.world)
    metadata = {METADATA_KEY: canonical_json(plan.header.to_json())} if query.header else None
    schema = STEPS_SCHEMA.with_metadata(metadata)
    return await arrow.respond(request, schema, lambda: _batches(plan, query.start, stop, query.rank, query.world))


def _batches(plan: PlanFile, start: int, stop: int, rank: int, world: int) -> Iterator[pa.RecordBatch]:
    per_step = (plan.report.segments // max(1, plan.steps) + plan.packs_per_step) // world + 1
    height = max(1, BATCH_SEGMENTS // per_step)
    for first in range(start, stop, height):
        yield plan.slice(first, min(first + height, stop), rank, world)


def _need(parts: Parts, spec: PlanSpec) -> None:
    """Keep the datasets while a plan is built from them; raise ``Evicted``."""
    parts.space.inventory.check_datasets(spec.datasets)
    parts.space.inventory.use(datasets=spec.datasets)


def _readable(open_plan: OpenPlans, plan_id: str) -> Plan | None:
    try:
        return _describe(open_plan(plan_id))
    except Damaged as error:
        log.warning("left out of the list: %s", error)
        return None


def _describe(plan: PlanFile) -> Plan:
    return Plan(id=plan.id, spec=plan.spec, report=plan.report, stored=True)
