"""Verify: read every shard's files again, and move aside what is not what its receipt states.

A shard that lost a file is a miss: the next job that needs it builds it again, byte for byte what its datasets state,
so that their ids stay.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import xxhash

from packhouse.client.errors import Damaged, NotFound, Unavailable
from packhouse.client.format import FileInfo, Manifest, receipt_path
from packhouse.client.receipt_file import ReceiptFile, read_receipt
from packhouse.client.store import Store
from packhouse.worker.shards import stored_files

QUARANTINE = "quarantine"
"""Folder of the store for damaged files: nothing reads it, and people may look into it."""
KEPT = 64
"""Files that stay in quarantine, the newest ones."""

_SHARD = re.compile(r"shards/[0-9a-f]{2}/([0-9a-f]{32})\.")

Fault = Literal["missing", "empty", "cut", "altered", "unreadable"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A file that is not what it should be."""

    file: str
    """Its store key."""
    fault: Fault
    moved: str | None
    """Its key in quarantine; None where there is nothing to move."""


@dataclass(frozen=True, slots=True)
class Verified:
    """A shard, or a dataset's manifest, that was read again."""

    id: str
    kind: Literal["shard", "dataset"]
    bytes: int
    findings: tuple[Finding, ...] = ()
    unfinished: bool = False
    """Whether the shard has no receipt: it is being written, its writer was killed, or its receipt is lost."""


def verify(store: Store, *, after: str = "", spend: Callable[[int], None] = lambda _: None) -> Iterator[Verified]:
    """Yield every shard behind the id ``after`` in the order of ids, then every dataset, as they are verified.

    ``spend`` is told the bytes of each piece that was read; it may wait, or raise to end it all. Raises ``Unavailable``
    where the store as a whole cannot be read or written.
    """
    for number in range(int(after[:2] or "0", 16), 256):
        names = (name for name in store.list(f"shards/{number:02x}") if _SHARD.match(name))
        for key, files in groupby(names, lambda name: name[10:42]):
            if key > after:
                yield verify_shard(store, key, set(files), spend)
    for name in store.list("datasets"):
        if name.endswith(".json"):
            yield _verify_dataset(store, name, spend)


def verify_shards(
    store: Store, keys: Iterable[str], spend: Callable[[int], None] = lambda _: None
) -> Iterator[Verified]:
    """Yield the shards ``keys`` as they are verified."""
    for key in keys:
        files = {name for name in store.list(f"shards/{key[:2]}") if name[10:42] == key}
        yield verify_shard(store, key, files, spend)


def verify_shard(store: Store, key: str, files: set[str], spend: Callable[[int], None]) -> Verified:
    """Read a shard's files; ``files`` are those that the store lists."""
    if receipt_path(key) not in files:
        return Verified(key, "shard", 0, unfinished=store.size(receipt_path(key)) is None)
    try:
        stored = read_receipt(store, key)
    except NotFound:
        return Verified(key, "shard", 0)  # removed while this was reading
    except Damaged:
        path = receipt_path(key)
        return Verified(key, "shard", 0, (_move_aside(store, path, "altered" if store.size(path) else "empty"),))
    read, found = 0, []
    for path, info in stored_files(stored).items():
        fault, size = _fault(store, path, info, spend)
        read += size
        if fault is not None:
            found.append((path, fault))
    if found and not _stands(store, stored):
        return Verified(key, "shard", read)  # built again or removed while this was reading
    return Verified(key, "shard", read, tuple(_move_aside(store, path, fault) for path, fault in found))


def _fault(store: Store, path: str, info: FileInfo, spend: Callable[[int], None]) -> tuple[Fault | None, int]:
    """Return what is wrong with a file, if anything is, and how many bytes of it were read."""
    state, read = xxhash.xxh3_128(), 0
    try:
        for piece in store.pieces(path):
            state.update(piece)
            read += len(piece)
            spend(len(piece))
    except NotFound:
        return "missing", read
    except Unavailable:
        return "unreadable", read
    if state.hexdigest() == info.digest:
        return None, read
    if read == info.bytes:
        return "altered", read
    return ("cut" if read else "empty"), read


def _stands(store: Store, stored: ReceiptFile) -> bool:
    try:
        return read_receipt(store, stored.receipt.key) == stored
    except (NotFound, Damaged):
        return False


def _verify_dataset(store: Store, name: str, spend: Callable[[int], None]) -> Verified:
    dataset = name.removeprefix("datasets/").removesuffix(".json")
    try:
        data = b"".join(store.pieces(name))
        spend(len(data))
        Manifest.load(data, dataset)
    except NotFound:
        return Verified(dataset, "dataset", 0)
    except Damaged:
        return Verified(dataset, "dataset", len(data), (_move_aside(store, name, "altered" if data else "empty"),))
    return Verified(dataset, "dataset", len(data))


def _move_aside(store: Store, path: str, fault: Fault) -> Finding:
    if fault == "missing":
        return Finding(path, fault, None)
    target = f"{QUARANTINE}/{time.time_ns():020}-{path.rpartition('/')[2]}"
    store.move(path, target)
    for old in list(store.list(QUARANTINE))[:-KEPT]:
        store.delete(old)
    return Finding(path, fault, target)
