"""Route of explanations: what of a job is in the cache, and why the rest is not."""

from typing import TYPE_CHECKING, cast

from fastapi import APIRouter

from packhouse.client.wire_explain import ExplainSpec, Explanation
from packhouse.service import work
from packhouse.service.json_body import JsonRoute
from packhouse.service.parts import Given
from packhouse.service.routes.params import NO_QUERY

if TYPE_CHECKING:
    from packhouse.worker.executor import Executor

router = APIRouter(prefix="/v1/cache", tags=["cache"], route_class=JsonRoute)


@router.post("/explain", dependencies=[NO_QUERY])
def explain(spec: ExplainSpec, parts: Given) -> Explanation:
    """Look a job's blocks up before it runs; nothing is made. Sources that are new are only read with ``scan``."""
    executor = cast("Executor", parts.executor)  # of which the routes know only its health
    return work.explain(spec, parts.store, parts.catalog, executor, parts.settings.tokenize_modules)
