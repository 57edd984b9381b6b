"""Judging: whether a job's bad records are more than it allows."""

from collections.abc import Mapping, Sequence
from typing import Any

from packhouse.client.errors import InvalidRequest
from packhouse.client.format import Receipt
from packhouse.client.store import Store
from packhouse.client.wire import JobSpec
from packhouse.worker.records import Reject
from packhouse.worker.shards import read_rejects
from packhouse.worker.sources import Block
from packhouse.worker.tally import Tally
from packhouse.worker.work import Done, at_line


class BadRecords(InvalidRequest):
    """More records cannot be used than the job allows."""

    kind = "bad-records"
    blocks: Sequence[dict[str, Any]] = ()
    """As in ``pipeline.Outcome``: those that are done, so that the records can be found."""


def judge_block(done: Done, spec: JobSpec) -> None:
    """Raise ``BadRecords`` for the first bad record, if the job asks for that."""
    if done.rejects and spec.on_bad_record == "fail":
        raise _bad_record(done.block, done.rejects[0])


def judge(blocks: Sequence[Block], receipts: Mapping[str, Receipt], tally: Tally, spec: JobSpec, store: Store) -> None:
    """Raise ``BadRecords`` when more records are bad than the job allows; ``receipts`` are by block digest."""
    bad, total = sum(tally.rejected.values()), tally.records
    if not bad:
        return
    block, first = next(
        (block, Reject(**reject))
        for block in blocks
        if receipts[block.digest].rejected
        for reject in read_rejects(store, receipts[block.digest].key)[:1]
    )
    if spec.on_bad_record == "fail":
        raise _bad_record(block, first)
    if bad > spec.max_bad_share * total:
        reasons = ", ".join(f"{name} {count:,}" for name, count in tally.rejected.most_common())
        place = at_line(block, first)
        raise BadRecords(
            f"{bad:,} of {total:,} records cannot be used ({reasons}), more than max_bad_share "
            f"{spec.max_bad_share:g}; the first is {block.source!r} line {place.row + 1}: {first.detail}",
            "mend the source, or raise max_bad_share",
        )


def _bad_record(block: Block, reject: Reject) -> BadRecords:
    detail = f"{block.source!r} line {at_line(block, reject).row + 1}: {reject.reason}, {reject.detail}"
    return BadRecords(detail, "mend the source, or set on_bad_record to 'quarantine'")
