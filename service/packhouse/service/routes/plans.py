"""Routes of plans: build, look, and read the packs of a rank."""

import logging
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Annotated

import pyarrow as pa
from anyio.to_thread import run_sync
from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from packhouse.client.digest import canonical_json
from packhouse.client.errors import Damaged
from packhouse.client.plan import METADATA_KEY, STEPS_SCHEMA, PlanFile, check_slice, plan_id, plan_path
from packhouse.client.wire import Wire
from packhouse.client.wire_plans import Plan, PlanReport, PlanSpec
from packhouse.service import arrow
from packhouse.service.json_body import JsonRoute
from packhouse.service.open_plans import Opener, OpenPlans
from packhouse.service.parts import Given
from packhouse.service.routes.params import NO_QUERY, ContentId, FromCursor, next_page

router = APIRouter(prefix="/v1/plans", tags=["plans"], route_class=JsonRoute)
log = logging.getLogger(__name__)

BATCH_SEGMENTS = 1 << 15
"""Segments of one batch of an Arrow stream, about."""


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


@router.post("", status_code=201, responses={200: {"description": "The plan was there, or this is a dry run"}})
async def build(
    spec: PlanSpec, query: Annotated[BuildQuery, Query()], parts: Given, open_plan: Opener, response: Response
) -> Plan:
    """Build a plan and return its report; the same request always gives the same plan."""
    from packhouse.worker.plan_task import build_where_it_fits  # the worker takes seconds to import

    known = await run_sync(parts.store.size, plan_path(plan_id(spec))) is not None
    plan = await run_sync(partial(build_where_it_fits, parts.executor, parts.store, spec, write=not query.dry_run))
    open_plan.forget()  # a plan whose shards were rebuilt since is written again
    response.status_code = 200 if known or query.dry_run else 201
    if plan.stored:
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


@router.get("/{plan_id}", dependencies=[NO_QUERY])
def show(plan_id: ContentId, open_plan: Opener) -> Plan:
    """Return one plan."""
    return _describe(open_plan(plan_id))


@router.get("/{plan_id}/report", dependencies=[NO_QUERY])
def report(plan_id: ContentId, open_plan: Opener) -> PlanReport:
    """Return how good a plan is."""
    return open_plan(plan_id).report


@router.get("/{plan_id}/steps", response_class=Response)
async def steps(
    plan_id: ContentId, query: Annotated[StepsQuery, Query()], open_plan: Opener, request: Request
) -> Response:
    """Return the packs of a rank as an Arrow stream; over all ranks they are the steps, in order."""
    plan = await run_sync(open_plan, plan_id)
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


def _readable(open_plan: OpenPlans, plan_id: str) -> Plan | None:
    try:
        return _describe(open_plan(plan_id))
    except Damaged as error:
        log.warning("left out of the list: %s", error)
        return None


def _describe(plan: PlanFile) -> Plan:
    return Plan(id=plan.id, spec=plan.spec, report=plan.report, stored=True)
