"""The store: immutable files under keys, written whole or not at all."""

import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, Protocol

import pyarrow as pa

from packhouse.client import faults
from packhouse.client.errors import InvalidRequest, NotFound, Unavailable

TEMPORARY = "tmp"
"""Folder of files that are being written; a reader never looks into it."""
ABANDONED_SECONDS = 24 * 3600.0
"""Age at which a temporary file is nobody's any more, whoever wrote it: a write takes seconds."""


PIECE = 4 << 20
"""Bytes of a file that are read at once where it is read by the piece."""


class ReadStore(Protocol):
    """What a reader needs of a store."""

    def open(self, key: str) -> pa.Buffer:
        """Return the bytes under ``key``, memory-mapped where the store can; raise ``NotFound``."""


class Store(ReadStore, Protocol):
    """What a writer needs of a store. Keys are relative paths with ``/``.

    Every method raises ``Unavailable`` where the store cannot do it now, and says why.
    """

    @property
    def location(self) -> str:
        """Where it is, for people: without keys that open it."""

    def check(self) -> None:
        """Make the store if it can be made; raise unless it can be written."""

    def write(self, key: str, data: Any) -> None:
        """Put ``data`` (buffer protocol) under ``key`` atomically; a later write of one key wins whole."""

    def size(self, key: str) -> int | None:
        """Return the length in bytes under ``key``, or None where there is nothing."""

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Return the size of each of ``keys``, asked for at once where that is faster."""

    def pieces(self, key: str) -> Iterator[bytes]:
        """Yield the bytes under ``key`` by the piece, read anew from where they lie; raise ``NotFound``."""

    def delete(self, key: str) -> None:
        """Remove ``key``; nothing happens where it does not exist."""

    def move(self, key: str, to: str) -> None:
        """Give a file another key; nothing happens where it does not exist."""

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the keys in the folder ``prefix``, sorted by bytes; one folder of them is held at a time."""

    def sweep(self) -> int:
        """Remove what dead writers left half-written; return how many files that were."""


def check_key(key: str) -> str:
    """Return ``key``; raise ``InvalidRequest`` for one that would leave its store."""
    if any(part in ("", ".", "..") or "\0" in part for part in key.split("/")):
        raise InvalidRequest(f"{key!r} is not a store key", "use a relative path without '..'")
    return key


def store_at(location: str) -> Store:
    """Return the store at a folder, or at ``s3://bucket/prefix``; raise ``InvalidRequest`` for another address."""
    if location.startswith("s3://"):
        from packhouse.client.s3_store import S3Store  # who has a folder need not load it

        return S3Store(location)
    if "://" in location:
        raise InvalidRequest(f"the store {location!r} is neither a folder nor an S3 address", "use s3://bucket/prefix")
    return LocalStore(location)


class LocalStore:
    """A store in a folder: a local disk or a mount shared by all nodes."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def __reduce__(self) -> tuple[type["LocalStore"], tuple[str]]:
        return LocalStore, (str(self.root),)

    def path(self, key: str) -> Path:
        """Return the file of ``key``; raise ``InvalidRequest`` for a key that would leave the store."""
        return self.root / check_key(key)

    def open(self, key: str) -> pa.Buffer:
        """Return a memory map of the file; it stays readable after the file is replaced or removed.

        Raises ``NotFound`` where there is none, and ``Unavailable`` where it cannot be read.
        """
        path = f"{self.root}/{check_key(key)}"
        try:
            if os.stat(path).st_size == 0:
                return pa.py_buffer(b"")
            with pa.memory_map(path) as file:
                return file.read_buffer()
        except FileNotFoundError:
            raise NotFound(f"the store {self.root} has no {key}") from None
        except OSError as error:
            raise self._unreadable(error) from None

    @property
    def location(self) -> str:
        """The folder."""
        return str(self.root)

    def check(self) -> None:
        """Make the folder, and write and remove a temporary file."""
        try:
            temporary = self._temporary()
            temporary.write_bytes(b"")
            temporary.unlink()
        except OSError as error:
            raise self._unwritable(error, "set PACKHOUSE_STORE to a folder that can be written") from error

    def write(self, key: str, data: Any) -> None:
        """Write a temporary file, flush it to the disk, then rename it and flush the folder."""
        target = self.path(key)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._temporary()
            try:
                _fill(temporary, memoryview(pa.py_buffer(data)), key)
                os.replace(temporary, target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            faults.point(faults.RENAMED, key)
            _flush_folder(target.parent)
        except OSError as error:
            remedy = "free or repair it and ask again: what is finished is kept"
            raise self._unwritable(error, remedy) from error

    def size(self, key: str) -> int | None:
        """Return the file's length in bytes, or None; raise ``Unavailable`` where that cannot be told."""
        try:
            info = os.stat(f"{self.root}/{check_key(key)}")  # quicker than a Path: a job asks for each of its shards
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unreadable(error) from None
        return info.st_size if stat.S_ISREG(info.st_mode) else None

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Return the length of each file, or None."""
        return [self.size(key) for key in keys]

    def pieces(self, key: str) -> Iterator[bytes]:
        """Read the file: a disk that fails under a memory map would end the process."""
        try:
            with open(self.path(key), "rb", buffering=0) as file:
                while piece := file.read(PIECE):
                    yield piece
        except FileNotFoundError:
            raise NotFound(f"the store {self.root} has no {key}") from None
        except OSError as error:
            raise self._unreadable(error) from None

    def delete(self, key: str) -> None:
        """Unlink the file if it is there."""
        try:
            self.path(key).unlink(missing_ok=True)
        except OSError as error:
            raise self._unwritable(error, "repair it") from error

    def move(self, key: str, to: str) -> None:
        """Rename the file if it is there."""
        source, target = self.path(key), self.path(to)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(source, target)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._unwritable(error, "repair it") from error

    def list(self, prefix: str) -> Iterator[str]:
        """Walk the folder ``prefix`` in sorted order."""
        self.path(prefix)
        yield from self._walk(prefix)

    def _walk(self, folder: str) -> Iterator[str]:
        try:
            with os.scandir(self.root / folder) as entries:
                # A folder sorts as what is in it does.
                names = sorted((entry.name + "/" * entry.is_dir() for entry in entries), key=os.fsencode)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._unreadable(error) from None
        for name in names:
            if name.endswith("/"):
                yield from self._walk(f"{folder}/{name[:-1]}")
            else:
                yield f"{folder}/{name}"

    def sweep(self) -> int:
        """Remove temporary files whose writer is dead; return how many.

        Whether a writer on another machine, or in another container, lives cannot be told: its files go when they are
        ``ABANDONED_SECONDS`` old.
        """
        removed, here, now = 0, _here(), time.time()
        for path in (self.root / TEMPORARY).glob("*~*~*"):
            owner, _, process = path.name.rpartition("~")[0].rpartition("~")
            try:
                if process.isdigit() and (
                    (owner == here and not _alive(int(process))) or now - path.stat().st_mtime > ABANDONED_SECONDS
                ):
                    path.unlink()
                    removed += 1
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._unwritable(error, "repair it") from error
        return removed

    def _temporary(self) -> Path:
        folder = self.root / TEMPORARY
        folder.mkdir(parents=True, exist_ok=True)
        # A random part: the process before may have had the same number, and have left its file behind.
        return folder / f"{_here()}~{os.getpid()}~{secrets.token_hex(8)}"

    def _unwritable(self, error: OSError, remedy: str) -> Unavailable:
        return Unavailable(f"the store cannot be written ({error.strerror}): {self.root}", remedy)

    def _unreadable(self, error: OSError) -> Unavailable:
        return Unavailable(f"the store {self.root} cannot be read ({error.strerror})", "repair it")


def _fill(path: Path, view: memoryview, key: str) -> None:
    """Write a new file and flush it to the disk."""
    with open(path, "xb", buffering=0) as file:
        half = len(view) // 2
        _write_all(file, view[:half])
        faults.point(faults.HALF_WRITTEN, key)
        _write_all(file, view[half:])
        os.fsync(file.fileno())
    faults.point(faults.WRITTEN, key)


def _write_all(file: IO[bytes], view: memoryview) -> None:
    while view:
        view = view[file.write(view) :]


@cache
def _here() -> str:
    """Name this machine; in a container, whose process numbers are its own, the name is its own too."""
    try:
        return f"{socket.gethostname()}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # no Linux, so no such containers
        return socket.gethostname()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
