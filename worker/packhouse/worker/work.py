"""What runs on a worker: scan sources, and turn blocks into shards. Results are receipts; no token travels."""

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from packhouse.client.format import Receipt
from packhouse.client.store import Store
from packhouse.worker.by_function import names_in
from packhouse.worker.files import check_unchanged, files_of
from packhouse.worker.provenance import made_by
from packhouse.worker.recipe import Recipe
from packhouse.worker.records import Reject
from packhouse.worker.shards import write_shard
from packhouse.worker.sources import Block, Fingerprint, read, scan
from packhouse.worker.tokenize import Toolkit, TooLong, tokenize

SHOWN_REJECTS = 3
"""Quarantine entries that travel with a result; all of them stand in the shard's sidecar."""
WRITERS = 4
"""Shards of a task that are written at once: flushing a file waits for the disk, and takes no CPU."""


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
    made_by: dict[str, str]
    """Versions of packhouse, engine and renderer, see ``provenance``."""
    failed: tuple[str, ...]
    """The parts, 'engine' and 'renderer', whose fast way an audit has found wrong."""
    audited: int
    fallbacks: Counter[str]
    rejects: tuple[Reject, ...]
    write_seconds: float
    """Time to write the shard's files to the store."""


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
    """Tokenize each block and commit its shard; what waits for the disk does so while the next block is tokenized."""
    with ThreadPoolExecutor(WRITERS) as writers:
        writes = [writers.submit(write) for write in (_encode_block(store, recipe, block, fast) for block in blocks)]
    return [write.result() for write in writes]


def names_in_blocks(store: Store, recipe: Recipe, blocks: list[Block]) -> list[tuple[str, list[str]]]:
    """Return, for each block, its digest and the names of the files that its records depend on."""
    function = _toolkit(store, recipe, True).function
    return [(block.digest, [] if function is None else names_in(read(block), function)) for block in blocks]


def warm_up(store: Store, recipe: Recipe) -> str:
    """Load and prove what ``recipe`` needs, before the first block comes; return the engine in use."""
    return _toolkit(store, recipe, True).encoder.name


def _encode_block(store: Store, recipe: Recipe, block: Block, fast: bool) -> Callable[[], Done]:
    """Tokenize a block; return what commits its shard."""
    toolkit = _toolkit(store, recipe, fast)
    try:
        files = files_of(block)
        samples = tokenize(read(block), toolkit, files)
        check_unchanged(files.values())
    except TooLong as error:
        raise TooLong(
            f"{block.source!r} line {block.first_line + error.row + 1}: {error.detail}", error.remedy
        ) from None
    parts, failed = made_by(samples.engine, toolkit), toolkit.failed

    def write() -> Done:
        begun = time.perf_counter()
        key = recipe.shard_key(block.digest)
        receipt = write_shard(store, key, samples, toolkit.vocab_size, made_by=parts)
        seconds = time.perf_counter() - begun
        rejects = tuple(samples.rejects[:SHOWN_REJECTS])
        return Done(block, receipt, samples.engine, parts, failed, samples.audited, samples.fallbacks, rejects, seconds)

    return write


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
