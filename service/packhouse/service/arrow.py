"""Arrow bodies: record batches streamed in bounded memory, with length and digest told before the first byte."""

from collections.abc import Callable, Iterator
from io import BytesIO

import pyarrow as pa
import xxhash
from anyio.to_thread import run_sync
from fastapi import Request
from fastapi.responses import Response, StreamingResponse

MEDIA_TYPE = "application/vnd.apache.arrow.stream"
DIGEST_HEADER = "packhouse-digest"
"""xxh3-128 of the body; the ETag is the same in quotes."""

Batches = Callable[[], Iterator[pa.RecordBatch]]


async def respond(request: Request, schema: pa.Schema, batches: Batches) -> Response:
    """Return the Arrow stream of ``batches()``, which is called twice and must give the same each time.

    The first pass only measures: whatever is damaged is a proper error, and a body that is cut on its way is seen.
    """
    length, digest = await run_sync(_measure, schema, batches)
    headers = {"etag": f'"{digest}"', DIGEST_HEADER: digest, "cache-control": "no-cache"}
    if matches(request.headers.get("if-none-match"), digest):
        return Response(status_code=304, headers=headers)
    headers["content-length"] = str(length)
    return StreamingResponse(_encode(schema, batches()), headers=headers, media_type=MEDIA_TYPE)


def matches(header: str | None, digest: str) -> bool:
    """Whether an If-None-Match header names ``digest``."""
    tags = [tag.strip().removeprefix("W/") for tag in (header or "").split(",")]
    return "*" in tags or f'"{digest}"' in tags


def _measure(schema: pa.Schema, batches: Batches) -> tuple[int, str]:
    length, state = 0, xxhash.xxh3_128()
    for chunk in _encode(schema, batches()):
        length += len(chunk)
        state.update(chunk)
    return length, state.hexdigest()


def _encode(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[bytes]:
    sink = BytesIO()
    with pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
            yield _drain(sink)
    yield _drain(sink)


def _drain(sink: BytesIO) -> bytes:
    chunk = sink.getvalue()
    sink.seek(0)
    sink.truncate()
    return chunk
