"""Routes of shards: their files, for readers that do not see the store."""

from fastapi import APIRouter, Request, Response

from packhouse.client.errors import NotFound
from packhouse.client.format import Receipt, data_path, meta_path
from packhouse.client.receipt_file import read_receipt
from packhouse.service import byte_ranges
from packhouse.service.checked_files import Files
from packhouse.service.openapi import told
from packhouse.service.parts import Given, Parts
from packhouse.service.routes.params import NO_QUERY, ContentId

router = APIRouter(prefix="/v1/shards", tags=["shards"])

MEDIA_TYPE = "application/vnd.apache.arrow.file"
FILE = byte_ranges.responses(MEDIA_TYPE) | told(404, 410, 500)


@router.head("/{key}", dependencies=[NO_QUERY], response_class=Response, include_in_schema=False)
@router.get("/{key}", dependencies=[NO_QUERY], response_class=Response, responses=FILE)
def data(key: ContentId, parts: Given, files: Files, request: Request) -> Response:
    """Return the shard file with the tokens, or a range of it."""
    info = _receipt(parts, key).data
    return byte_ranges.respond(request, files.open(key, data_path(key), info), info.digest, MEDIA_TYPE)


@router.head("/{key}/meta", dependencies=[NO_QUERY], response_class=Response, include_in_schema=False)
@router.get("/{key}/meta", dependencies=[NO_QUERY], response_class=Response, responses=FILE)
def meta(key: ContentId, parts: Given, files: Files, request: Request) -> Response:
    """Return the shard's meta file with the numbers of its samples, or a range of it."""
    info = _receipt(parts, key).meta
    return byte_ranges.respond(request, files.open(key, meta_path(key), info), info.digest, MEDIA_TYPE)


def _receipt(parts: Parts, key: str) -> Receipt:
    try:
        receipt = read_receipt(parts.store, key).receipt
    except NotFound:
        parts.space.inventory.check_shard(key)
        raise NotFound(f"there is no shard {key}", "run the job that makes it again") from None
    parts.space.used("shards", key)
    return receipt
