"""Backup and restore: the database's rows of one moment, and the files of the store that they speak of.

A backup is a folder: ``backup.json``, which is written last, the rows in ``tables/``, and a store in ``store/``. What
is listed is copied behind what it names (a shard's receipt behind its files, a manifest behind its shards), so that a
backup of a service that runs is whole, however often it is cut short.
"""

from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Self

from sqlalchemy import Engine

from packhouse.client.digest import canonical_json, digest_bytes, sealed, unsealed
from packhouse.client.errors import Damaged, InvalidRequest, NotFound, Unavailable
from packhouse.client.format import receipt_path
from packhouse.client.receipt_file import read_receipt
from packhouse.client.store import LocalStore, Store
from packhouse.client.wire import Wire
from packhouse.client.wire_cache import RescanReport
from packhouse.service.inventory import Inventory
from packhouse.service.rescan import FOLDERS, rescan
from packhouse.service.store_format import OURS, StoreFormat, unfit
from packhouse.service.table_files import TableFile, dump_tables, load_tables, path_of

FORMAT = 1
NAME = "backup.json"


class Copied(Wire):
    """How many files were copied, and how many were there already."""

    files: int = 0
    bytes: int = 0
    kept: int = 0
    damaged: int = 0
    """Shards that were left out, because their files are not what their receipts state."""

    def add(self, size: int) -> Self:
        """Return the sums with one more file of ``size`` bytes."""
        return self.model_copy(update={"files": self.files + 1, "bytes": self.bytes + size})


class Backup(Wire):
    """What a backup says of itself."""

    format: int = FORMAT
    packhouse: str
    """Version of the program that wrote it."""
    made_at: datetime
    """The moment of which its tables are."""
    tables_version: int
    store_shards: int
    store_plans: int
    """Formats of shards and plans."""
    location: str
    """The store that it is of."""
    shards: bool
    """Whether it has the shards too."""
    tables: dict[str, TableFile]
    copied: Copied
    """In the call that wrote this: what an earlier one had copied is kept."""


class Restored(Wire):
    """What a restore brought back."""

    backup: Backup
    copied: Copied
    store: RescanReport
    """What the store holds now."""


Tell = Callable[[Copied], None]


def back_up(engine: Engine, store: Store, folder: Path, *, shards: bool, tell: Tell = lambda _: None) -> Backup:
    """Write a backup into ``folder``, new or that of an earlier one, to which only what is new is added.

    Raises ``InvalidRequest`` for a folder of something else and for a database without tables.
    """
    read_backup(folder)
    began = datetime.now(UTC)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tables_version, tables = dump_tables(engine, folder / "tables")
        copied = _copy(store, LocalStore(folder / "store"), tell, shards=shards)
        backup = Backup(
            packhouse=version("packhouse"),
            made_at=began,
            tables_version=tables_version,
            store_shards=OURS.shards,
            store_plans=OURS.plans,
            location=store.location,
            shards=shards,
            tables=tables,
            copied=copied,
        )
        LocalStore(folder).write(NAME, sealed(backup.model_dump(mode="json")))
        named = {path_of(folder / "tables", name, file) for name, file in tables.items()}
        for path in set((folder / "tables").iterdir()) - named:
            path.unlink()
    except OSError as error:
        raise Unavailable(f"the folder {folder} cannot be written ({error.strerror})", "name another") from error
    return backup


def restore(
    engine: Engine, store: Store, folder: Path, *, lease: float = 20.0, tell: Tell = lambda _: None
) -> Restored:
    """Bring a backup back into an empty database and a store, whose files that are there already stay.

    What the database then says of the store is compared with it: of shards that are not there, a job will say that
    they were evicted. Cut short, it can be run again. Raises ``InvalidRequest`` where the database is in use, or the
    backup is of a newer version; ``NotFound`` and ``Damaged`` for the backup.
    """
    backup = read_backup(folder)
    if backup is None:
        raise NotFound(f"there is no backup in {folder}", "name the folder that 'packhouse backup' wrote")
    held = StoreFormat(backup.store_shards, backup.store_plans)
    source = LocalStore(folder / "store")
    if held != OURS:
        raise InvalidRequest(*unfit(source, held))
    copied = _copy(source, store, tell, shards=backup.shards)
    load_tables(engine, folder / "tables", backup.tables_version, backup.tables)
    report = deque(rescan(Inventory(engine, lease=lease), store, keep_uses=True), maxlen=1).pop()
    return Restored(backup=backup, copied=copied, store=report)


def read_backup(folder: Path) -> Backup | None:
    """Return what the backup in ``folder`` says, None where it is empty or missing; raise for anything else there."""
    try:
        found = unsealed((folder / NAME).read_bytes())
        if found["format"] != FORMAT:
            raise ValueError(f"its format is {found['format']} and this program knows {FORMAT}")
        return Backup.model_validate_json(canonical_json(found))
    except FileNotFoundError:
        left = {path.name for path in folder.iterdir()} - {"tables", "store", "tmp"} if folder.is_dir() else set()
        if left:
            fact = f"the folder {folder} is no backup: it holds {min(left)!r}"
            raise InvalidRequest(fact, "name a new folder, or that of an earlier backup") from None
        return None
    except NotADirectoryError:
        raise InvalidRequest(f"{folder} is no folder", "name a folder") from None
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{folder / NAME} cannot be read ({error})", "use another backup") from None


def _copy(source: Store, target: Store, tell: Tell, *, shards: bool) -> Copied:
    """Copy what the store holds; what names others is listed before them, and copied behind them."""
    plans, datasets = list(source.list("plans")), list(source.list("datasets"))
    copied = Copied()
    for keys in (source.list("tokenizers"), source.list("presets")):
        for key in keys:
            copied = _copy_file(source, target, key, copied)
    for key in _shard_keys(source) if shards else ():
        copied = _copy_shard(source, target, key, copied)
        tell(copied)
    for key in datasets:
        copied = _copy_file(source, target, key, copied)
        tell(copied)
    for key in plans:
        for part in source.list(key.replace("plans/", "packs/").removesuffix(".arrow")):
            copied = _copy_file(source, target, part, copied)
        copied = _copy_file(source, target, key, copied)
        tell(copied)
    return copied


def _shard_keys(store: Store) -> Iterator[str]:
    for folder in FOLDERS:
        for name in store.list(f"shards/{folder}"):
            if name.endswith(".json"):
                yield name.rpartition("/")[2].removesuffix(".json")


def _copy_shard(source: Store, target: Store, key: str, copied: Copied) -> Copied:
    """Copy a shard's files and then its receipt; leave out one that is damaged, or is evicted meanwhile."""
    from packhouse.worker.shards import stored_files  # the worker takes seconds to import

    try:
        stored = read_receipt(source, key)
        for name, info in stored_files(stored).items():
            if target.size(name) == info.bytes:
                copied = copied.model_copy(update={"kept": copied.kept + 1})
                continue
            data = source.open(name)
            if data.size != info.bytes or digest_bytes(data) != info.digest:
                return copied.model_copy(update={"damaged": copied.damaged + 1})
            target.write(name, data)
            copied = copied.add(data.size)
    except NotFound:
        return copied
    except Damaged:
        return copied.model_copy(update={"damaged": copied.damaged + 1})
    return _copy_file(source, target, receipt_path(key), copied)


def _copy_file(source: Store, target: Store, key: str, copied: Copied) -> Copied:
    """Copy a file unless it is there, or was removed meanwhile."""
    try:
        data = source.open(key)
    except NotFound:
        return copied
    if target.size(key) == data.size and target.open(key).equals(data):
        return copied.model_copy(update={"kept": copied.kept + 1})
    target.write(key, data)
    return copied.add(data.size)
