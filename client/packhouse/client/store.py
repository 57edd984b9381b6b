"""The store: immutable files under keys, written whole or not at all."""

import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from packhouse.client.errors import InvalidRequest, NotFound, Unavailable

TEMPORARY = "tmp"
"""Folder of files that are being written; a reader never looks into it."""


class ReadStore(Protocol):
    """What a reader needs of a store."""

    def open(self, key: str) -> pa.Buffer:
        """Return the bytes under ``key``, memory-mapped where the store can; raise ``NotFound``."""


class Store(ReadStore, Protocol):
    """What a writer needs of a store. Keys are relative paths with ``/``."""

    def write(self, key: str, data: Any) -> None:
        """Put ``data`` (buffer protocol) under ``key`` atomically; a later write of one key wins whole."""

    def size(self, key: str) -> int | None:
        """Return the length in bytes under ``key``, or None where there is nothing."""

    def delete(self, key: str) -> None:
        """Remove ``key``; nothing happens where it does not exist."""

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the keys in the folder ``prefix``, sorted by bytes."""


class LocalStore:
    """A store in a folder: a local disk or a mount shared by all nodes."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def __reduce__(self) -> tuple[type["LocalStore"], tuple[str]]:
        return LocalStore, (str(self.root),)

    def path(self, key: str) -> Path:
        """Return the file of ``key``; raise ``InvalidRequest`` for a key that would leave the store."""
        parts = key.split("/")
        if not key or any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise InvalidRequest(f"{key!r} is not a store key", "use a relative path without '..'")
        return self.root.joinpath(*parts)

    def open(self, key: str) -> pa.Buffer:
        """Return a memory map of the file; it stays readable after the file is replaced or removed.

        Raises ``NotFound`` where there is none, and ``Unavailable`` where it cannot be read.
        """
        path = self.path(key)
        try:
            if path.stat().st_size == 0:
                return pa.py_buffer(b"")
            with pa.memory_map(str(path)) as file:
                return file.read_buffer()
        except FileNotFoundError:
            raise NotFound(f"the store {self.root} has no {key}") from None
        except OSError as error:
            raise Unavailable(f"the store {self.root} cannot be read ({error.strerror})", "repair it") from None

    def write(self, key: str, data: Any) -> None:
        """Write a temporary file, flush it to the disk, then rename it and flush the folder."""
        target = self.path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._temporary()
        try:
            with open(temporary, "xb", buffering=0) as file:
                view = memoryview(pa.py_buffer(data))
                while view:
                    view = view[file.write(view) :]
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _flush_folder(target.parent)

    def size(self, key: str) -> int | None:
        """Return the file's length in bytes, or None; raise ``Unavailable`` where that cannot be told."""
        try:
            return self.path(key).stat().st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unavailable(f"the store {self.root} cannot be read ({error.strerror})", "repair it") from None

    def delete(self, key: str) -> None:
        """Unlink the file if it is there."""
        self.path(key).unlink(missing_ok=True)

    def list(self, prefix: str) -> Iterator[str]:
        """Walk the folder ``prefix`` in sorted order."""
        base = self.path(prefix)
        for path in sorted(base.rglob("*"), key=os.fsencode):
            if path.is_file():
                yield path.relative_to(self.root).as_posix()

    def sweep(self) -> int:
        """Remove temporary files whose writer is dead; return how many. Other hosts' files are left alone."""
        removed = 0
        host = socket.gethostname()
        for path in (self.root / TEMPORARY).glob("*"):
            owner, _, process = path.name.rpartition("~")[0].rpartition("~")
            if owner == host and process.isdigit() and not _alive(int(process)):
                path.unlink(missing_ok=True)
                removed += 1
        return removed

    def _temporary(self) -> Path:
        folder = self.root / TEMPORARY
        folder.mkdir(parents=True, exist_ok=True)
        # A random part: the process before may have had the same number, and have left its file behind.
        return folder / f"{socket.gethostname()}~{os.getpid()}~{secrets.token_hex(8)}"


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
