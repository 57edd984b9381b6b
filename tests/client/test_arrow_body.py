"""Arrow bodies: whatever the network cuts them into, every row arrives."""

import httpx
import numpy as np
import pyarrow as pa
import pytest
import xxhash

from packhouse.client.arrow_body import DIGEST_HEADER, read_batches

SCHEMA = pa.schema([pa.field("n", pa.int32(), nullable=False)])


@pytest.mark.parametrize("chunk", [1, 1000, 65_536, 10**7])
def test_a_batch_longer_than_a_chunk_is_read_whole(chunk: int) -> None:
    numbers, sink = np.arange(50_000, dtype=np.int32), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        for part in np.split(numbers, [10, 45_000]):
            writer.write_batch(pa.RecordBatch.from_arrays([pa.array(part)], schema=SCHEMA))
    body = sink.getvalue().to_pybytes()
    pieces = (body[at : at + chunk] for at in range(0, len(body), chunk))
    headers = {DIGEST_HEADER: xxhash.xxh3_128(body).hexdigest()}
    response = httpx.Response(200, headers=headers, content=pieces, request=httpx.Request("GET", "http://here"))
    batches = list(read_batches(response, SCHEMA))
    assert np.concatenate([batch.column(0).to_numpy() for batch in batches]).tolist() == numbers.tolist()
