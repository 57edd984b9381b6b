"""The route of presets: packs brought along, kept under the digest of their content."""

from anyio.to_thread import run_sync
from fastapi import APIRouter, HTTPException, Request

from packhouse.client.preset import MOST_BYTES, from_zip
from packhouse.client.wire_plans import Preset
from packhouse.service.openapi import told
from packhouse.service.parts import Given
from packhouse.service.routes.params import NO_QUERY

router = APIRouter(prefix="/v1/presets", tags=["plans"])


@router.post(
    "",
    status_code=201,
    dependencies=[NO_QUERY],
    responses=told(413),
    openapi_extra={"requestBody": {"required": True, "content": {"application/zip": {}}}},
)
async def put(parts: Given, request: Request) -> Preset:
    """Keep the files of a ZIP; the id is what a plan of strategy ``preset`` names."""
    from packhouse.worker.packing.preset import put_preset  # the worker takes seconds to import

    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise HTTPException(413)
    return Preset(id=await run_sync(lambda: put_preset(parts.store, from_zip(bytes(body)))))
