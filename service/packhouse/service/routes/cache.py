"""Routes of the cache: what it holds, what stays, and what goes to make room."""

from collections.abc import Iterator
from itertools import chain

from anyio.to_thread import run_sync
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from packhouse.client.wire import Wire
from packhouse.client.wire_cache import CacheEntry, CacheUsage, GcReport, GcSpec, RescanReport
from packhouse.client.wire_explain import Explanation
from packhouse.service.json_body import JsonRoute
from packhouse.service.openapi import gives, told
from packhouse.service.parts import Given
from packhouse.service.routes.params import NO_QUERY, ContentId, FromCursor, next_page

router = APIRouter(prefix="/v1/cache", tags=["cache"], route_class=JsonRoute)

MEDIA_TYPE = "application/x-ndjson"
LINES = gives(MEDIA_TYPE)


class UseSpec(Wire):
    """What a client uses without the service's help: from a store that it has mounted."""

    datasets: list[ContentId] = []  # noqa: RUF012 - pydantic copies it
    plans: list[ContentId] = []  # noqa: RUF012


@router.get("", dependencies=[NO_QUERY])
def usage(parts: Given) -> CacheUsage:
    """Return what the store holds, by recipe."""
    return parts.space.usage()


@router.get("/entries")
def index(query: FromCursor, parts: Given, request: Request, response: Response) -> list[CacheEntry]:
    """List datasets and plans by id, also those that were evicted; the Link header leads on."""
    parts.space.write_uses()
    page = parts.space.inventory.entries(query.after, query.limit)
    if len(page) == query.limit:
        response.headers.update(next_page(request, after=page[-1].id))
    return page


@router.delete(
    "/entries/{entry_id}", dependencies=[NO_QUERY], response_class=Response, responses=LINES | told(404, 409, 410)
)
async def remove(entry_id: ContentId, parts: Given) -> Response:
    """Remove a dataset with the shards that only it has, or a plan; answers as gc does. 409 for what is in use."""
    return await lines(parts.space.remove(entry_id))


@router.put("/pins/{entry_id}", dependencies=[NO_QUERY], responses=told(404, 410))
def pin(entry_id: ContentId, parts: Given) -> CacheEntry:
    """Pin a dataset or a plan: it is not evicted, nor what it needs."""
    return parts.space.inventory.pin(entry_id, True)


@router.delete("/pins/{entry_id}", dependencies=[NO_QUERY], responses=told(404, 410))
def unpin(entry_id: ContentId, parts: Given) -> CacheEntry:
    """Let a dataset or plan go when its time comes."""
    return parts.space.inventory.pin(entry_id, False)


@router.post("/uses", status_code=204, dependencies=[NO_QUERY], responses=told(404, 410, 413))
def use(spec: UseSpec, parts: Given) -> None:
    """Note that datasets and plans are in use, by someone who reads the store without the service."""
    parts.space.inventory.check_datasets(spec.datasets)
    for plan in spec.plans:
        parts.space.inventory.check_plan(plan)
    parts.space.inventory.use(datasets=spec.datasets, plans=spec.plans)


@router.post("/gc", dependencies=[NO_QUERY], response_class=Response, responses=LINES | told(409, 413))
async def gc(spec: GcSpec, parts: Given) -> Response:
    """Make room: JSON lines that say how far it is, the last one with ``done``. 409 while another one cleans."""
    return await lines(parts.space.gc(spec.budget, dry_run=spec.dry_run))


@router.post("/rescan", dependencies=[NO_QUERY], response_class=Response, responses=LINES | told(409))
async def rescan(parts: Given) -> Response:
    """Make the catalog what the store is: JSON lines that say how far it is, the last one with ``done``."""
    return await lines(parts.space.rescan())


async def lines(steps: Iterator[GcReport] | Iterator[RescanReport] | Iterator[Explanation]) -> Response:
    """Stream the steps; what refuses the first one is a proper error. A client that goes away ends them."""
    first = await run_sync(next, steps)
    body = (step.model_dump_json() + "\n" for step in chain([first], steps))
    return StreamingResponse(body, media_type=MEDIA_TYPE)
