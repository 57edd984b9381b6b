"""Tables as files: the rows of a database at one moment, as Arrow files that either kind of database can take in again.

They are read by what the database says of itself, so that one of an older version is saved as it is. Which services
live, and what they do alone, is not saved: where it is taken in again, none does.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from sqlalchemy import Connection, Engine, MetaData, Table, func, insert, select, text

from packhouse.client.digest import digest_bytes
from packhouse.client.errors import Damaged, InvalidRequest
from packhouse.client.wire import Wire
from packhouse.service.database import CHUNK
from packhouse.service.migrations import SCHEMA_VERSION, found_version, migrate

LEFT_OUT = {"schema_version", "services", "locks"}

_TYPES = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), str: pa.large_string(), bytes: pa.large_binary()}


class TableFile(Wire):
    """A table's rows in a file."""

    rows: int
    bytes: int
    digest: str
    """xxh3-128 of the file."""


def dump_tables(engine: Engine, folder: Path) -> tuple[int, dict[str, TableFile]]:
    """Write each table into a file of ``folder``; return the version of the tables, and what was written.

    All rows are those of one moment, and no service waits for it. A file is named by table and content, so that the
    files of an earlier call stay until nobody names them. Raises ``InvalidRequest`` where there is no such database.
    """
    folder.mkdir(exist_ok=True)
    with _moment(engine) as connection:
        version = found_version(connection)
        if not 0 < version <= SCHEMA_VERSION:
            held = f"tables of version {version}, and this program knows {SCHEMA_VERSION}" if version else "no tables"
            raise InvalidRequest(
                f"the database {engine.url!r} has {held}",
                "set PACKHOUSE_HOME, or PACKHOUSE_DATABASE_URL, to those of the service; use its version of packhouse",
            )
        return version, {table.name: _dump(connection, table, folder) for table in _tables(connection)}


def load_tables(engine: Engine, folder: Path, version: int, files: Mapping[str, TableFile]) -> None:
    """Fill an empty database, all of it or nothing, and bring it up to this program's version.

    Raises ``InvalidRequest`` where it is not empty, or the files are of a newer version, and ``Damaged``.
    """
    if version > SCHEMA_VERSION:
        raise InvalidRequest(
            f"the backup has tables of version {version} and this program knows version {SCHEMA_VERSION}",
            "use the packhouse version that wrote it, or a newer one",
        )
    opened = {name: _opened(folder, name, file) for name, file in files.items()}
    with engine.connect() as connection:
        _check_empty(connection)
    migrate(engine, version)
    with engine.begin() as connection:
        for table in _tables(connection):
            rows = opened[table.name]
            for number in range(rows.num_record_batches):
                connection.execute(insert(table), rows.get_batch(number).to_pylist())
            if "serial" in table.columns and connection.dialect.name == "postgresql":
                last = select(func.max(table.c.serial)).scalar_subquery()
                connection.execute(select(func.setval(func.pg_get_serial_sequence(table.name, "serial"), last)))
    migrate(engine)


def path_of(folder: Path, name: str, file: TableFile) -> Path:
    """Return where a table lies."""
    return folder / f"{name}-{file.digest}.arrow"


@contextmanager
def _moment(engine: Engine) -> Iterator[Connection]:
    """Read in one transaction, which sees nothing of what others write meanwhile."""
    with engine.connect() as connection:
        if connection.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN")  # the driver begins a transaction with the first write only
        else:
            connection = connection.execution_options(isolation_level="REPEATABLE READ")
        yield connection
        connection.rollback()


def _tables(connection: Connection) -> list[Table]:
    """Return the tables as they are, those that others refer to first."""
    found = MetaData()
    found.reflect(connection)
    return [table for table in found.sorted_tables if table.name not in LEFT_OUT]


def _dump(connection: Connection, table: Table, folder: Path) -> TableFile:
    schema = pa.schema([(column.name, _TYPES[column.type.python_type]) for column in table.columns])
    temporary, rows = folder / f"{table.name}.tmp", 0
    with open(temporary, "wb") as file:
        with pa.ipc.new_file(file, schema) as writer:
            query = select(table).order_by(*table.primary_key.columns)
            result = connection.execution_options(yield_per=CHUNK).execute(query).mappings()
            for some in result.partitions():
                writer.write_batch(pa.RecordBatch.from_pylist([dict(row) for row in some], schema))
                rows += len(some)
        file.flush()
        os.fsync(file.fileno())
    with pa.memory_map(str(temporary)) as mapped:
        data = mapped.read_buffer()
        written = TableFile(rows=rows, bytes=data.size, digest=digest_bytes(data))
    os.replace(temporary, path_of(folder, table.name, written))
    return written


def _opened(folder: Path, name: str, file: TableFile) -> Any:
    path = path_of(folder, name, file)
    try:
        with pa.memory_map(str(path)) as mapped:
            data = mapped.read_buffer()
    except (OSError, pa.ArrowInvalid) as error:
        raise Damaged(f"the backup's file {path} cannot be read ({error})", "use another backup") from None
    if digest_bytes(data) != file.digest:
        raise Damaged(f"the backup's file {path} is not what was written", "use another backup")
    return pa.ipc.open_file(data)


def _check_empty(connection: Connection) -> None:
    for table in _tables(connection):
        if connection.scalar(select(text("1")).select_from(table).limit(1)) is not None:
            raise InvalidRequest(
                f"the database {connection.engine.url!r} is in use: its table {table.name} has rows",
                "restore into an empty one: set PACKHOUSE_HOME or PACKHOUSE_DATABASE_URL",
            )
