"""Files of shards as they are handed out: each is checked when this process first does."""

import threading
from collections import OrderedDict
from typing import Annotated

import pyarrow as pa
from fastapi import Depends, Request

from packhouse.client.digest import digest_bytes
from packhouse.client.errors import Damaged, NotFound
from packhouse.client.format import FileInfo
from packhouse.client.store import Store

REMEMBERED = 1 << 16
"""Files that were checked of which it is known."""


class CheckedFiles:
    """The files of a store that are what their receipts state. Any thread may ask."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._checked: OrderedDict[tuple[str, str], None] = OrderedDict()

    def open(self, shard: str, path: str, info: FileInfo) -> pa.Buffer:
        """Return the bytes of a file of ``shard``; move it aside and raise ``Damaged`` if they are not as stated."""
        try:
            content = self._store.open(path)
        except NotFound:
            raise self._damaged(shard, f"{path} is missing and its receipt is there") from None
        if content.size != info.bytes:
            raise self._damaged(shard, f"{path} has {content.size} bytes and its receipt says {info.bytes}")
        if not self._known((path, info.digest)):
            if digest_bytes(content) != info.digest:
                raise self._damaged(shard, f"the bytes of {path} are not those its receipt states")
            self._know((path, info.digest))
        return content

    def _known(self, file: tuple[str, str]) -> bool:
        with self._lock:
            return file in self._checked

    def _know(self, file: tuple[str, str]) -> None:
        with self._lock:
            self._checked[file] = None
            while len(self._checked) > REMEMBERED:
                self._checked.popitem(last=False)

    def _damaged(self, shard: str, fact: str) -> Damaged:
        from packhouse.worker.verify import verify_shards  # the worker takes seconds to import

        found = [finding for one in verify_shards(self._store, [shard]) for finding in one.findings]
        moved = f" (moved to {found[0].moved})" if found and found[0].moved else ""
        return Damaged(fact + moved, "run the job again to rebuild the shard")


def _of_app(request: Request) -> CheckedFiles:
    files = request.app.state.checked_files
    assert isinstance(files, CheckedFiles)
    return files


Files = Annotated[CheckedFiles, Depends(_of_app)]
"""A route's parameter that receives the checked files."""
