"""Files over HTTP: one byte range at a time, a strong ETag, and never more than a chunk in memory."""

import re
from collections.abc import Iterator

import pyarrow as pa
from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from packhouse.client.errors import PackhouseError
from packhouse.service import problems
from packhouse.service.arrow import DIGEST_HEADER, matches
from packhouse.service.openapi import Responses, gives, told

CHUNK = 1 << 20

_RANGE = re.compile(r"bytes=(?:(\d{1,18})-(\d{0,18})|-(\d{1,18}))")


class OutOfRange(PackhouseError):
    """No byte of the range that was asked for is there."""

    kind = "out-of-range"
    status = 416


def respond(request: Request, data: pa.Buffer, digest: str, media_type: str) -> Response:
    """Return ``data``, or the part of it that a Range header names; several ranges at once get all of it.

    ``digest`` is the xxh3-128 of all of ``data``.
    """
    headers = {"etag": f'"{digest}"', DIGEST_HEADER: digest, "accept-ranges": "bytes", "cache-control": "no-cache"}
    if matches(request.headers.get("if-none-match"), digest):
        return Response(status_code=304, headers=headers)
    start, stop, status = 0, data.size, 200
    wanted = _RANGE.fullmatch(request.headers.get("range", ""))
    if wanted and request.headers.get("if-range", f'"{digest}"') == f'"{digest}"':
        start, stop = _bounds(wanted, data.size)
        if start >= stop:
            return _refuse(wanted[0], data.size)
        status = 206
        headers["content-range"] = f"bytes {start}-{stop - 1}/{data.size}"
    headers["content-length"] = str(stop - start)
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type=media_type)
    return StreamingResponse(_chunks(data, start, stop), status, headers, media_type)


def responses(media_type: str) -> Responses:
    """Return what a route that answers by ``respond`` may answer with."""
    return gives(media_type, empty=(304,)) | gives(media_type, status=206) | told(416)


def _bounds(wanted: re.Match[str], size: int) -> tuple[int, int]:
    first, last, suffix = wanted.groups()
    if suffix is not None:
        return max(0, size - int(suffix)), size
    return int(first), min(size, int(last) + 1) if last else size


def _refuse(wanted: str, size: int) -> Response:
    error = OutOfRange(f"the range {wanted!r} has no byte of this file", f"it has {size:,} bytes, from 0")
    return problems.respond(problems.describe(error), {"content-range": f"bytes */{size}"})


def _chunks(data: pa.Buffer, start: int, stop: int) -> Iterator[bytes]:
    for at in range(start, stop, CHUNK):
        yield data.slice(at, min(CHUNK, stop - at)).to_pybytes()
