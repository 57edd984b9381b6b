"""What runs on a worker: scan sources, and turn blocks into shards. Results are receipts; no token travels."""

from collections import Counter
from dataclasses import dataclass, replace

from packhouse.client.errors import Unavailable
from packhouse.client.format import Receipt
from packhouse.client.store import Store
from packhouse.worker.recipe import Recipe
from packhouse.worker.records import Reject
from packhouse.worker.shards import write_shard
from packhouse.worker.sources import Block, Fingerprint, read, scan
from packhouse.worker.tokenize import Toolkit, TooLong, tokenize

SHOWN_REJECTS = 3
"""Quarantine entries that travel with a result; all of them stand in the shard's sidecar."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """A source's blocks, and whether its file was the same before and after, and old enough, to remember them."""

    fingerprint: Fingerprint
    blocks: tuple[Block, ...]
    settled: bool


@dataclass(frozen=True, slots=True)
class Done:
    """A block that became a shard, and how."""

    block: Block
    receipt: Receipt
    engine: str
    fast: bool
    """Whether the fast engine or the fast renderer had a part in it."""
    failed: tuple[str, ...]
    """The parts, 'engine' and 'renderer', whose fast way an audit has found wrong."""
    audited: int
    fallbacks: Counter[str]
    rejects: tuple[Reject, ...]


def scan_sources(paths: list[str], documents: str = "file") -> list[Scanned]:
    """Cut each source into blocks."""
    results = []
    for path in paths:
        before = Fingerprint.of(path, documents)
        settled = before.settled()
        blocks = tuple(scan(path, documents))
        results.append(Scanned(before, blocks, settled and Fingerprint.of(path, documents) == before))
    return results


def encode_blocks(store: Store, recipe: Recipe, blocks: list[Block], *, fast: bool) -> list[Done]:
    """Tokenize each block and commit its shard."""
    return [_encode_block(store, recipe, block, fast=fast) for block in blocks]


def warm_up(store: Store, recipe: Recipe) -> str:
    """Load and prove what ``recipe`` needs, before the first block comes; return the engine in use."""
    return _toolkit(store, recipe, True).encoder.name


def _encode_block(store: Store, recipe: Recipe, block: Block, *, fast: bool) -> Done:
    toolkit = _toolkit(store, recipe, fast)
    try:
        samples = tokenize(read(block), toolkit)
    except TooLong as error:
        raise TooLong(
            f"{block.source!r} line {block.first_line + error.row + 1}: {error.detail}", error.remedy
        ) from None
    try:
        receipt = write_shard(store, recipe.shard_key(block.digest), samples, toolkit.vocab_size)
    except OSError as error:
        remedy = "free or repair it and submit the job again: finished shards are kept"
        raise Unavailable(f"the store cannot be written ({error.strerror})", remedy) from None
    return Done(
        block,
        receipt,
        samples.engine,
        toolkit.fast,
        toolkit.failed,
        samples.audited,
        samples.fallbacks,
        tuple(samples.rejects[:SHOWN_REJECTS]),
    )


_TOOLKITS: dict[tuple[Recipe, bool], Toolkit] = {}
_MAX_TOOLKITS = 2


def _toolkit(store: Store, recipe: Recipe, fast: bool) -> Toolkit:
    """Return the recipe's toolkit; the process keeps it for the blocks to come."""
    key = recipe, fast
    if key not in _TOOLKITS:
        while len(_TOOLKITS) >= _MAX_TOOLKITS:
            del _TOOLKITS[next(iter(_TOOLKITS))]
        _TOOLKITS[key] = Toolkit.load(store, recipe, fast=fast)
    return _TOOLKITS[key]


def at_line(block: Block, reject: Reject) -> Reject:
    """Return a quarantine entry with its place counted from the start of the source."""
    return replace(reject, row=block.first_line + reject.row, offset=block.offset + reject.offset)
