"""ShardCache: files fetched from elsewhere, kept in one folder within a byte budget that all processes of a node share.

A file takes its name when it has arrived whole. ``fetched.json`` lists what this cache put into the folder, with size,
inode and time of writing; nothing else is ever removed. A use is noted as time of access. Changes of that list are made
under a lock on ``lock``; a fetch is made under one of 256 further locks, so that one process fetches a shard and the
others wait for it.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import IO, Protocol

import pyarrow as pa
import xxhash

from packhouse.client.digest import digest_bytes
from packhouse.client.errors import Damaged, InvalidRequest, NotFound, PackhouseError, Unavailable
from packhouse.client.fetch_ahead import FetchAhead
from packhouse.client.format import Receipt, data_path
from packhouse.client.retry import PATIENCE, retried
from packhouse.client.settings import cache_budget, cache_folder
from packhouse.client.store import LocalStore

Entry = tuple[int, int, int]
"""Size, inode and time of writing of a file that was fetched: another one in its place differs in one of them."""

LOCKS = 256
CHUNK = 1 << 20
LEFT_OVER = 3600.0
"""Seconds after which a part that nobody wrote to was left by a process that is gone: patience ends long before."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The bytes of a file from ``start`` on, as they arrive."""

    start: int
    total: int
    """Bytes of the whole file."""
    digest: str | None
    """xxh3-128 of the whole file, where the source knows it."""
    chunks: Iterator[bytes]


class Source(Protocol):
    """Where files come from; it can be pickled."""

    def piece(self, key: str, start: int) -> AbstractContextManager[Piece]:
        """Open the file ``key`` from byte ``start`` on, or from an earlier one; raise ``NotFound``, ``Unavailable``."""


class ShardCache:
    """A ``ReadStore`` that fetches what it lacks.

    ``budget`` bounds the bytes of fetched files (default PACKHOUSE_CACHE_BYTES). What is on its way comes on top, up to
    five files a process. Maps of removed files stay readable, and their space comes back when they are closed.
    ``patience`` is how long, in seconds, a source may be away.
    """

    def __init__(
        self,
        source: Source,
        folder: str | PathLike[str] | None = None,
        budget: int | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self._source = source
        self._folder = Path(cache_folder() if folder is None else folder)
        self._budget = cache_budget() if budget is None else budget
        self._patience = patience
        self._local = LocalStore(self._folder)
        self._ahead = FetchAhead(self._ensure)

    def __reduce__(self) -> tuple[object, ...]:
        return ShardCache, (self._source, self._folder, self._budget, self._patience)

    def open(self, key: str) -> pa.Buffer:
        """Return a memory map of the fetched file.

        Raises ``NotFound``, ``Damaged`` if it never arrives whole, and ``Unavailable`` where the source stays away.
        """
        for _ in range(5):
            self._ensure(key)
            try:
                _note_use(self._local.path(key))
                return self._local.open(key)
            except (FileNotFoundError, NotFound):
                continue  # another process has made room meanwhile
        raise Unavailable(
            f"{key} is removed from {self._folder} as fast as it is fetched", "raise PACKHOUSE_CACHE_BYTES"
        )

    def fetch_ahead(self, receipts: list[Receipt]) -> None:
        """Begin to fetch the shards that are not here, in this order, as far as half of the budget reaches."""
        room, keys = self._budget // 2, []
        for receipt in receipts:
            room -= receipt.data.bytes
            if room < 0:
                break
            key = data_path(receipt.key)
            if self._local.size(key) is None:
                keys.append(key)
        self._ahead.want(keys)

    def forget(self, receipt: Receipt) -> bool:
        """Remove a shard that is not as its receipt states; return whether this cache had fetched it."""
        key = data_path(receipt.key)
        with self._locked("lock"):
            fetched = self._list()
            if not self._remove(key, fetched.pop(key, None)):
                return False
            self._write_list(fetched)
        return True

    def _ensure(self, key: str) -> None:
        if self._local.size(key) is not None:
            return
        name = digest_bytes(key.encode())
        part = self._folder / "tmp" / f"{name}.part"
        lock, whom = f"locks/{int(name, 16) % LOCKS}", f"another process, which fetches {key}"
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            with self._locked(lock, whom, lambda: _size(part)):
                if self._local.size(key) is None:
                    self._fetch(key, part)
        except OSError as error:
            remedy = "free some space there, or set PACKHOUSE_CACHE to another folder"
            raise Unavailable(f"{self._folder} cannot be written ({error.strerror})", remedy) from error

    def _fetch(self, key: str, part: Path) -> None:
        try:
            retried(lambda: self._transfer(key, part), key, self._patience, lambda: _size(part))
            self._install(key, part)
        except PackhouseError:
            part.unlink(missing_ok=True)
            raise

    def _transfer(self, key: str, part: Path) -> None:
        """Append what is missing to ``part``; what a broken connection brought is kept for the next try."""
        with open(part, "ab") as file, self._source.piece(key, file.tell()) as piece:
            if piece.total > self._budget:
                raise InvalidRequest(
                    f"{key} has {piece.total:,} bytes and the cache may hold {self._budget:,}",
                    "raise PACKHOUSE_CACHE_BYTES",
                )
            file.truncate(piece.start)
            for chunk in piece.chunks:
                file.write(chunk)
            file.flush()
            size = os.fstat(file.fileno()).st_size
        if size != piece.total:
            if size > piece.total:
                part.unlink()
            raise Unavailable(f"{key} ended after {size:,} of {piece.total:,} bytes", "try again")
        if piece.digest is not None and _digest(part) != piece.digest:
            part.unlink()
            raise Damaged(f"{key} was altered or cut on its way", "try again")

    def _install(self, key: str, part: Path) -> None:
        target = self._local.path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        _note_use(part)  # it is younger than all that is there, however long it took to come
        info = part.stat()
        with self._locked("lock"):
            fetched = self._list()
            self._sweep()
            self._make_room(fetched, info.st_size)
            # Noted first: a file that is noted and not there is harmless, the other way round it would never go.
            fetched[key] = _entry(info)
            self._write_list(fetched)
            os.replace(part, target)

    def _make_room(self, fetched: dict[str, Entry], needed: int) -> None:
        """Remove the files used longest ago until ``needed`` bytes more are within the budget."""
        used: list[tuple[int, str]] = []
        for key in fetched:
            try:
                used.append((self._local.path(key).stat().st_atime_ns, key))
            except FileNotFoundError:
                used.append((0, key))
        total = sum(size for size, _, _ in fetched.values())
        for _, key in sorted(used):
            if total + needed <= self._budget:
                return
            entry = fetched.pop(key)
            total -= entry[0]
            self._remove(key, entry)

    def _sweep(self) -> None:
        """Remove what killed processes had begun to fetch, and nobody has asked for since."""
        for part in (self._folder / "tmp").glob("[0-9a-f]" * 32 + ".part"):
            with suppress(FileNotFoundError):
                if time.time() - part.stat().st_mtime > LEFT_OVER:
                    part.unlink()

    def _remove(self, key: str, entry: Entry | None) -> bool:
        path = self._local.path(key)
        try:
            info = path.stat()
        except FileNotFoundError:
            return False
        if entry is None or _entry(info) != entry:
            return False
        path.unlink(missing_ok=True)
        return True

    def _list(self) -> dict[str, Entry]:
        try:
            found = json.loads((self._folder / "fetched.json").read_bytes())
            return {key: (size, inode, written) for key, (size, inode, written) in found.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, AttributeError):
            return {}  # what was fetched before is then taken for somebody else's, and stays

    def _write_list(self, fetched: dict[str, Entry]) -> None:
        temporary = self._folder / "fetched.json.new"
        temporary.write_text(json.dumps(fetched))
        os.replace(temporary, self._folder / "fetched.json")

    @contextmanager
    def _locked(
        self,
        name: str,
        whom: str = "another process, which makes room",
        progress: Callable[[], int] = lambda: 0,
    ) -> Iterator[None]:
        """Hold a lock; raise ``Unavailable`` if it is not free in twice the patience without ``progress``."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            _wait_for(file, whom, 2 * self._patience, progress)
            try:
                yield
            finally:
                # Closing does not do: a process forked meanwhile has the file open too, and would keep the lock.
                fcntl.flock(file, fcntl.LOCK_UN)


def _wait_for(file: IO[bytes], whom: str, limit: float, progress: Callable[[], int]) -> None:
    end, before = time.monotonic() + limit, progress()
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if (now := progress()) != before:
                end, before = time.monotonic() + limit, now
            elif time.monotonic() > end:
                raise Unavailable(f"waited {limit:.0f} s for {whom}", "end the process that holds the lock") from None
            time.sleep(0.02)


def _note_use(path: Path) -> None:
    """Set the time of access, and nothing else, of the very file that is there now."""
    with open(path, "rb") as file, suppress(PermissionError):  # somebody else's file need not be noted
        os.utime(file.fileno(), ns=(time.time_ns(), os.fstat(file.fileno()).st_mtime_ns))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _entry(info: os.stat_result) -> Entry:
    return info.st_size, info.st_ino, info.st_mtime_ns


def _digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            state.update(chunk)
    return state.hexdigest()
