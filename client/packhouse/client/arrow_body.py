"""Arrow streams over HTTP, read in pieces: one that is cut or altered is an error, never fewer rows."""

from collections.abc import Iterator
from io import RawIOBase

import httpx
import pyarrow as pa
import xxhash

from packhouse.client.errors import Damaged

DIGEST_HEADER = "packhouse-digest"
"""xxh3-128 of the body."""


def read_batches(response: httpx.Response, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a streamed response; raise ``Damaged`` unless it is whole and of ``schema``."""
    body = _Body(response)
    remedy = "ask for it again"
    try:
        with pa.ipc.open_stream(body) as reader:
            if not reader.schema.equals(schema):
                raise Damaged(f"{response.url} came as {reader.schema}", "use a client and a service of one version")
            yield from reader
    except (pa.ArrowException, OSError) as error:
        raise Damaged(f"the answer of {response.url} cannot be read ({error})", remedy) from error
    body.finish()
    if body.digest() != response.headers.get(DIGEST_HEADER):
        raise Damaged(f"the answer of {response.url} was altered or cut on its way", remedy)


class _Body(RawIOBase):
    """A response's body as a file that can be read once."""

    def __init__(self, response: httpx.Response) -> None:
        self._chunks = response.iter_bytes()
        self._rest = memoryview(b"")
        self._state = xxhash.xxh3_128()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        # Arrow takes fewer bytes than it asked for as the end, and a chunk ends where the network likes.
        done = 0
        while done < len(buffer):
            if not self._rest:
                self._rest = memoryview(next(self._chunks, b""))
                self._state.update(self._rest)
                if not self._rest:
                    break
            size = min(len(buffer) - done, len(self._rest))
            buffer[done : done + size] = self._rest[:size]
            self._rest = self._rest[size:]
            done += size
        return done

    def finish(self) -> None:
        """Read to the end."""
        for chunk in self._chunks:
            self._state.update(chunk)

    def digest(self) -> str:
        """Return the digest of what was read."""
        return self._state.hexdigest()
