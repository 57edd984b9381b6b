"""Rejected records of a job: from the shards' sidecars back to lines and bytes of the sources."""

import json
from collections.abc import Iterator

from packhouse.client.format import rejected_path
from packhouse.client.store import ReadStore
from packhouse.client.wire import Rejected
from packhouse.service.catalog import RejectedBlock


def rejected_records(
    store: ReadStore, blocks: Iterator[RejectedBlock], *, offset: int, limit: int
) -> Iterator[Rejected]:
    """Yield the rejected records ``offset:offset + limit`` of ``blocks``; sidecars before them are not opened."""
    for block in blocks:
        if limit <= 0:
            return
        if offset >= block.records:
            offset -= block.records
            continue
        lines = bytes(store.open(rejected_path(block.shard))).splitlines()[offset : offset + limit]
        for line in lines:
            yield _locate(block, json.loads(line))
        offset, limit = 0, limit - len(lines)


def _locate(block: RejectedBlock, entry: dict[str, object]) -> Rejected:
    row, offset = entry["row"], entry["offset"]
    assert isinstance(row, int)
    assert isinstance(offset, int)
    place = {"source": block.source, "line": block.first_line + row + 1, "offset": block.offset + offset}
    rest = {name: entry[name] for name in ("length", "reason", "detail")}
    return Rejected.model_validate({**place, **rest})
