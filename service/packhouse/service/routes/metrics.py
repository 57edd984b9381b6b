"""The route of metrics, as Prometheus reads them."""

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import choose_encoder

from packhouse.service.openapi import gives
from packhouse.service.parts import Given
from packhouse.service.routes.params import NO_QUERY

router = APIRouter(tags=["health"])


@router.get(
    "/metrics",
    dependencies=[NO_QUERY],
    response_class=Response,
    responses=gives("text/plain", "application/openmetrics-text"),
)
def metrics(parts: Given, request: Request) -> Response:
    """Return all metrics in the format that Accept asks for: Prometheus text or OpenMetrics."""
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(parts.metrics.registry), headers={"content-type": media_type})
