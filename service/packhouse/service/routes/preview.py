"""Route of the preview: what the first records of a job would become."""

from fastapi import APIRouter

from packhouse.client.wire import Preview, PreviewSpec
from packhouse.service import work
from packhouse.service.json_body import JsonRoute
from packhouse.service.openapi import told
from packhouse.service.parts import Given
from packhouse.service.routes.params import NO_QUERY

router = APIRouter(prefix="/v1/preview", tags=["preview"], route_class=JsonRoute)


@router.post("", dependencies=[NO_QUERY], responses=told(413))
def preview(spec: PreviewSpec, parts: Given) -> Preview:
    """Render and tokenize the first records of a job's first source, trained tokens marked; nothing is stored of it."""
    return work.preview(spec, parts.store, parts.settings.tokenize_modules)
