"""Routes of datasets: list, look, and read the numbers of their samples."""

import logging
from collections.abc import Iterator
from itertools import islice

import pyarrow as pa
from anyio.to_thread import run_sync
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from packhouse.client.digest import digest_bytes
from packhouse.client.errors import Damaged, NotFound
from packhouse.client.format import META_SCHEMA, Manifest, Receipt, manifest_path, read_manifest, read_meta
from packhouse.client.store import ReadStore
from packhouse.client.wire import Dataset
from packhouse.service import arrow, byte_ranges
from packhouse.service.openapi import gives, told
from packhouse.service.parts import Given, Parts
from packhouse.service.routes.params import NO_QUERY, ContentId, FromCursor, Paged, next_page

router = APIRouter(prefix="/v1/datasets", tags=["datasets"])
log = logging.getLogger(__name__)

BATCH_ROWS = 1 << 16
"""Most rows of one batch of an Arrow stream."""
GONE = told(404, 410, 500)
"""A dataset that is not there, is not any more, or is damaged."""


@router.get("")
def index(query: FromCursor, parts: Given, request: Request, response: Response) -> list[Dataset]:
    """List datasets by id; the Link header leads on."""
    keys = (key for key in parts.store.list("datasets") if key.endswith(".json"))
    ids = (key.removeprefix("datasets/").removesuffix(".json") for key in keys)
    page = list(islice((one for one in ids if query.after is None or one > query.after), query.limit))
    if len(page) == query.limit:
        response.headers.update(next_page(request, after=page[-1]))
    return [dataset for one in page if (dataset := _readable(parts.store, one)) is not None]


@router.get("/{dataset_id}", dependencies=[NO_QUERY], responses=GONE)
def show(dataset_id: ContentId, parts: Given) -> Dataset:
    """Return one dataset."""
    return describe(_manifest(parts, dataset_id))


@router.get(
    "/{dataset_id}/manifest",
    dependencies=[NO_QUERY],
    response_class=Response,
    responses=byte_ranges.responses("application/json") | GONE,
)
def manifest(dataset_id: ContentId, parts: Given, request: Request) -> Response:
    """Return the manifest file: its shards in order, each with the sizes and digests of its files."""
    _manifest(parts, dataset_id)
    data = parts.store.open(manifest_path(dataset_id))
    return byte_ranges.respond(request, data, digest_bytes(data), "application/json")


@router.get(
    "/{dataset_id}/meta",
    response_class=Response,
    responses=gives(arrow.MEDIA_TYPE, "application/json", empty=(304,)) | GONE,
)
async def meta(dataset_id: ContentId, page: Paged, parts: Given, request: Request) -> Response:
    """Return the numbers of every sample as an Arrow stream; or of a page of them as JSON, where that is accepted."""
    whole = await run_sync(_manifest, parts, dataset_id)
    if "application/json" in request.headers.get("accept", ""):
        return await run_sync(_meta_page, whole, page.offset, page.limit, parts.store, request)
    start, stop = (page.offset, page.offset + page.limit) if "limit" in page.model_fields_set else (page.offset, None)
    return await arrow.respond(request, META_SCHEMA, lambda: sample_numbers(whole, parts.store, start, stop))


def describe(manifest: Manifest) -> Dataset:
    """Return a dataset as the wire tells it."""
    shards = manifest.shards
    return Dataset(
        id=manifest.id,
        recipe_digest=manifest.recipe_digest,
        recipe=manifest.recipe,
        vocab_size=manifest.vocab_size,
        shards=len(shards),
        rows=manifest.rows,
        tokens=manifest.tokens,
        trained_tokens=sum(shard.trained_tokens for shard in shards),
        attention_cost=sum(shard.attention_cost for shard in shards),
        bytes=sum(shard.data.bytes + shard.meta.bytes for shard in shards),
    )


def sample_numbers(manifest: Manifest, store: ReadStore, start: int, stop: int | None) -> Iterator[pa.RecordBatch]:
    """Yield the rows ``start:stop`` of the dataset as ``META_SCHEMA``; one shard is open at a time."""
    first = 0
    for receipt in manifest.shards:
        low = max(0, start - first)
        high = receipt.rows if stop is None else min(receipt.rows, stop - first)
        if low < high:
            batch = _numbers(store, receipt)
            for at in range(low, high, BATCH_ROWS):
                yield batch.slice(at, min(BATCH_ROWS, high - at))
        first += receipt.rows


def _numbers(store: ReadStore, receipt: Receipt) -> pa.RecordBatch:
    try:
        return read_meta(store, receipt)
    except NotFound as error:
        raise Damaged(f"a shard of the dataset is missing: {error.detail}", "run the job again to rebuild it") from None


def _manifest(parts: Parts, dataset_id: str) -> Manifest:
    try:
        manifest = read_manifest(parts.store, dataset_id)
    except NotFound:
        parts.space.inventory.check_datasets([dataset_id])
        raise NotFound(f"there is no dataset {dataset_id}", "'packhouse datasets' lists them") from None
    parts.space.used("datasets", dataset_id)
    return manifest


def _meta_page(manifest: Manifest, offset: int, limit: int, store: ReadStore, request: Request) -> Response:
    batches = sample_numbers(manifest, store, offset, offset + limit)
    rows = [row for batch in batches for row in batch.to_pylist()]
    more = offset + limit < manifest.rows
    return JSONResponse(rows, headers=next_page(request, offset=offset + limit, limit=limit) if more else None)


def _readable(store: ReadStore, dataset_id: str) -> Dataset | None:
    try:
        return describe(read_manifest(store, dataset_id))
    except Damaged as error:
        log.warning("left out of the list: %s", error)
        return None
