"""Route of explanations: what of a job is in the cache, and why the rest is not."""

from typing import TYPE_CHECKING, cast

from anyio.to_thread import run_sync
from fastapi import APIRouter, Request, Response

from packhouse.client.wire_explain import ExplainSpec, Explanation
from packhouse.service import work
from packhouse.service.json_body import JsonRoute
from packhouse.service.openapi import told
from packhouse.service.parts import Given
from packhouse.service.routes.cache import LINES, MEDIA_TYPE, lines
from packhouse.service.routes.params import NO_QUERY

if TYPE_CHECKING:
    from packhouse.worker.executor import Executor

router = APIRouter(prefix="/v1/cache", tags=["cache"], route_class=JsonRoute)


@router.post("/explain", dependencies=[NO_QUERY], response_model=Explanation, responses=LINES | told(409, 413))
async def explain(spec: ExplainSpec, parts: Given, request: Request) -> Response:
    """Look a job's blocks up before it runs; nothing is made. Sources that are new are only read with ``scan``.

    Where ``Accept`` names ``application/x-ndjson`` it answers as gc does: JSON lines, the last one with ``done``.
    """
    executor = cast("Executor", parts.executor)  # of which the routes know only its health
    steps = work.explain(spec, parts.store, parts.catalog, executor, parts.settings.tokenize_modules)
    if MEDIA_TYPE in request.headers.get("accept", ""):
        return await lines(steps)
    *_, last = await run_sync(list, steps)
    return Response(last.model_dump_json(), media_type="application/json")
