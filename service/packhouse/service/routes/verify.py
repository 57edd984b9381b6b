"""The route that verifies the cache: every stored file is read again, and what is damaged is moved aside."""

from collections.abc import Iterator

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from packhouse.client.wire import Wire
from packhouse.client.wire_verify import VerifyReport
from packhouse.service.json_body import JsonRoute
from packhouse.service.openapi import gives, told
from packhouse.service.parts import Given
from packhouse.service.routes.params import NO_QUERY, ContentId
from packhouse.service.verifying import reports

router = APIRouter(prefix="/v1/cache", tags=["cache"], route_class=JsonRoute)


class Asked(Wire):
    """``VerifySpec``, its keys checked."""

    shards: list[ContentId] = []  # noqa: RUF012 - pydantic copies it


@router.post(
    "/verify",
    dependencies=[NO_QUERY],
    response_class=Response,
    responses=gives("application/x-ndjson") | told(404, 413),
)
def verify(spec: Asked, parts: Given) -> Response:
    """Verify all, or some shards: JSON lines that say how far it is, the last one with ``done``."""
    from packhouse.worker.verify import verify as whole  # the worker takes seconds to import
    from packhouse.worker.verify import verify_shards

    verified = verify_shards(parts.store, spec.shards) if spec.shards else whole(parts.store)
    return StreamingResponse(_lines(reports(verified, len(spec.shards))), media_type="application/x-ndjson")


def _lines(steps: Iterator[VerifyReport]) -> Iterator[str]:
    return (step.model_dump_json() + "\n" for step in steps)
