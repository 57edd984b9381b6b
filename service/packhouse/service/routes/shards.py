"""Routes of shards: their files, for readers that do not see the store."""

import json

from fastapi import APIRouter, Request, Response

from packhouse.client.errors import Damaged, NotFound
from packhouse.client.format import FileInfo, Receipt, data_path, meta_path, receipt_path
from packhouse.client.store import ReadStore
from packhouse.service import byte_ranges
from packhouse.service.parts import Given
from packhouse.service.routes.params import NO_QUERY, ContentId

router = APIRouter(prefix="/v1/shards", tags=["shards"])

MEDIA_TYPE = "application/vnd.apache.arrow.file"


@router.api_route("/{key}", methods=["GET", "HEAD"], dependencies=[NO_QUERY], response_class=Response)
def data(key: ContentId, parts: Given, request: Request) -> Response:
    """Return the shard file with the tokens, or a range of it."""
    return _file(parts.store, data_path(key), _receipt(parts.store, key).data, request)


@router.api_route("/{key}/meta", methods=["GET", "HEAD"], dependencies=[NO_QUERY], response_class=Response)
def meta(key: ContentId, parts: Given, request: Request) -> Response:
    """Return the shard's meta file with the numbers of its samples, or a range of it."""
    return _file(parts.store, meta_path(key), _receipt(parts.store, key).meta, request)


def _receipt(store: ReadStore, key: str) -> Receipt:
    try:
        return Receipt.from_json(json.loads(bytes(store.open(receipt_path(key)))))
    except NotFound:
        raise NotFound(f"there is no shard {key}", "run the job that makes it again") from None
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"the receipt of shard {key} cannot be read ({error})", "run the job again") from error


def _file(store: ReadStore, path: str, info: FileInfo, request: Request) -> Response:
    try:
        content = store.open(path)
    except NotFound:
        raise Damaged(f"{path} is missing and its receipt is there", "run the job again to rebuild the shard") from None
    if content.size != info.bytes:
        fact = f"{path} has {content.size} bytes and its receipt says {info.bytes}"
        raise Damaged(fact, "run the job again to rebuild the shard")
    return byte_ranges.respond(request, content, info.digest, MEDIA_TYPE)
