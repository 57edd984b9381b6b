"""The same records in every kind of source."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq

from packhouse.worker.sources import Block, read

KINDS = ["jsonl.gz", "jsonl.zst", "json", "json.gz", "parquet", "feather", "arrow"]
"""All but plain JSON lines."""

ROWS = [{"text": f"é {n} " + "x" * (n % 90), "n": n} for n in range(3000)]
LINES = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in ROWS)


def zstd(data: bytes) -> bytes:
    packed: bytes = pa.compress(data, codec="zstd", asbytes=True)
    return packed


def write(path: Path, kind: str) -> Path:
    half = len(LINES) // 2
    array = json.dumps(ROWS, indent=1, ensure_ascii=False).encode()
    table = pa.Table.from_pylist(ROWS)
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=1000)
    elif kind == "feather":
        feather.write_feather(table, str(path), chunksize=1000)
    elif kind == "arrow":
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    else:
        members = gzip.compress(LINES[:half]) + gzip.compress(LINES[half:])
        frames = zstd(LINES[:half]) + zstd(LINES[half:])
        data = {
            "jsonl": LINES,
            "jsonl.gz": members,
            "jsonl.zst": frames,
            "json": array,
            "json.gz": gzip.compress(array),
        }
        path.write_bytes(data[kind])
    return path


def records(blocks: list[Block]) -> list[Any]:
    return [json.loads(line) for block in blocks for line in read(block).splitlines()]
