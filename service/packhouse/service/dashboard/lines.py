"""The lines behind rejected records, read back from sources that are known not to have changed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packhouse.client.errors import PackhouseError
from packhouse.client.wire import Job, Rejected
from packhouse.service.catalog import Catalog

if TYPE_CHECKING:
    from packhouse.worker.sources import Block

SHOWN = 2_000
"""Bytes of a line that are shown."""
UNPACKED = 32 << 20
"""Bytes that are unpacked, for all lines of a page together, to get at lines of sources that are not plain."""

_TURNS = (0x200E, 0x200F, 0x061C, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROL: dict[int, int | str] = {
    **{code: 0x2400 + code for code in range(32) if code not in (9, 10)},
    127: 0x2421,
    **{code: f"[U+{code:04X}]" for code in _TURNS},
}
"""Control characters, which a page would swallow, to pictures of them; and what would turn a line's direction."""


@dataclass(frozen=True, slots=True)
class Offence:
    """A rejected record with its line."""

    record: Rejected
    text: str | None
    """Its first bytes; None where they are not shown."""
    cut: int
    """Bytes of the line behind those."""
    why_not: str = ""
    """Why the line is not shown."""


def offences(job: Job, records: Sequence[Rejected], catalog: Catalog) -> list[Offence]:
    """Return the records with their lines.

    A source is read only where it is the very file or object that the job read; else another one's content might be
    shown for the line.
    """
    blocks: dict[str, Sequence[Block] | str] = {}
    left, found = UNPACKED, []
    for record in records:
        if record.source not in blocks:
            blocks[record.source] = _blocks(record.source, job.spec.documents, catalog)
        known = blocks[record.source]
        if isinstance(known, str):
            found.append(Offence(record, None, 0, known))
            continue
        offence, cost = _offence(record, known, left)
        left -= cost
        found.append(offence)
    return found


def _blocks(source: str, documents: str, catalog: Catalog) -> "Sequence[Block] | str":
    """Return the blocks of a source as the job saw it, or why they are not known."""
    from packhouse.worker import lookup, sources

    try:
        seen = sources.fingerprints([source], documents)
    except (PackhouseError, OSError):
        return "the source is not there any more"
    known = lookup.remembered_blocks(list(seen.values()), catalog).get(source)
    return known if known is not None else "the source has changed since it was read"


def _offence(record: Rejected, blocks: "Sequence[Block]", budget: int) -> tuple[Offence, int]:
    """Return a record with its line, and how many bytes were unpacked for it."""
    from packhouse.worker import places

    line = record.line - 1
    block = next((one for one in blocks if one.first_line <= line < one.first_line + one.lines), None)
    if block is None:
        return Offence(record, None, 0, "the source has changed since it was read"), 0
    wanted, cost = min(record.length, SHOWN), 0
    try:
        if block.how == "lines":
            data = places.read_range(record.source, record.offset, wanted)
        elif (cost := record.offset + wanted) > budget:
            return Offence(record, None, 0, "it lies too deep in a source that has to be unpacked"), 0
        else:
            data = _unpacked(block, record.offset, wanted)
    except (PackhouseError, OSError):
        return Offence(record, None, 0, "the source cannot be read"), cost
    text = data.decode("utf-8", "replace").translate(_CONTROL)
    return Offence(record, text, record.length - len(data)), cost


def _unpacked(block: "Block", offset: int, length: int) -> bytes:
    from packhouse.worker.readers import unpack

    return _slice(unpack(block.source, block.how, block.part), offset, length)


def _slice(chunks: Iterator[bytes], offset: int, length: int) -> bytes:
    data, begin = bytearray(), 0
    for chunk in chunks:
        data += chunk[max(0, offset - begin) :]
        begin += len(chunk)
        if len(data) >= length:
            break
    return bytes(data[:length])
