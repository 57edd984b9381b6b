"""The database: SQLite or PostgreSQL behind one engine, and the few words in which their SQL differs."""

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import (
    JSON,
    ColumnElement,
    Connection,
    Double,
    Engine,
    FromClause,
    Text,
    cast,
    create_engine,
    event,
    func,
    literal,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from packhouse.client.errors import InvalidRequest, Unavailable
from packhouse.service.migrations import migrate
from packhouse.service.tables import Table

T = TypeVar("T")

BUSY_SECONDS = 10
"""How long SQLite waits for another writer."""
CHUNK = 5_000
"""Values of one statement: SQLite takes 32,766 of them, PostgreSQL 65,535."""


class now(FunctionElement[float]):  # noqa: N801 - it reads as the SQL function that it is
    """Seconds since 1970 by the database's clock, the only one that all services share."""

    type = Double()
    inherit_cache = True


@compiles(now, "sqlite")  # type: ignore[no-untyped-call, untyped-decorator, unused-ignore]
def _now_sqlite(element: now, compiler: SQLCompiler, **options: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now, "postgresql")  # type: ignore[no-untyped-call, untyped-decorator, unused-ignore]
def _now_postgresql(element: now, compiler: SQLCompiler, **options: Any) -> str:
    return "extract(epoch from clock_timestamp())::double precision"


def open_database(url: str) -> Engine:
    """Return the database at ``url`` with its tables brought up to date.

    Raises ``InvalidRequest`` for a URL that cannot be used and for tables of a newer version, ``Unavailable`` for a
    database that does not answer.
    """
    engine = engine_of(url)
    try:
        migrate(engine)
    except DBAPIError as error:
        raise Unavailable(
            f"the database {engine.url!r} cannot be opened ({str(error.orig).strip()})",
            "check PACKHOUSE_DATABASE_URL, and that the server runs or the folder can be written",
        ) from error
    return engine


def upsert(connection: Connection, table: type[Table], keys: list[str], only: Iterable[str] | None = None) -> Any:
    """Return an insert that, where a row has the same ``keys``, sets its other columns, or ``only`` these."""
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    statement = dialect.insert(table)
    names = [column.name for column in table.__table__.columns if column.name not in keys] if only is None else only
    changed = {name: statement.excluded[name] for name in names}
    if not changed:
        return statement.on_conflict_do_nothing(index_elements=keys)
    return statement.on_conflict_do_update(index_elements=keys, set_=changed)


def pairs(connection: Connection, values: Mapping[str, int]) -> FromClause:
    """Return a table with the columns key and value, sent as one parameter: far faster than a row at a time."""
    document = json.dumps(values)
    if connection.dialect.name == "postgresql":
        return func.json_each_text(cast(literal(document, Text), JSON)).table_valued("key", "value")
    return func.json_each(document).table_valued("key", "value")


def among(connection: Connection, column: Any, values: Iterable[str]) -> ColumnElement[bool]:
    """Return whether a text ``column`` is one of ``values``, sent as one parameter: thousands of them take no time."""
    document = json.dumps(list(values))
    if connection.dialect.name == "postgresql":
        each = func.json_array_elements_text(cast(literal(document, Text), JSON)).table_valued("value")
    else:
        each = func.json_each(document).table_valued("value")
    condition: ColumnElement[bool] = column.in_(select(each.c.value))
    return condition


def chunks(values: Iterable[T], size: int = CHUNK) -> Iterator[list[T]]:
    """Cut ``values`` into lists that fit into one statement."""
    rest = iter(values)
    while some := list(islice(rest, size)):
        yield some


def engine_of(url: str) -> Engine:
    """Return the database at ``url`` as it is; raise ``InvalidRequest`` for a URL that cannot be used."""
    try:
        address = make_url(url)
        if address.drivername == "postgresql":
            address = address.set(drivername="postgresql+psycopg")
        engine = create_engine(address, pool_pre_ping=True)
    except ModuleNotFoundError as error:
        fact = f"the database URL needs {error.name}, which is not installed"
        raise InvalidRequest(fact, "pip install 'packhouse[cluster]' for PostgreSQL") from error
    except (SQLAlchemyError, ImportError, ValueError) as error:
        raise InvalidRequest(f"the database URL cannot be used ({error})", "set PACKHOUSE_DATABASE_URL") from error
    if engine.dialect.name not in ("sqlite", "postgresql"):
        fact = f"the database URL names {engine.dialect.name}, and only SQLite and PostgreSQL are supported"
        raise InvalidRequest(fact, "set PACKHOUSE_DATABASE_URL to one like postgresql://user@host/packhouse")
    event.listen(engine, "connect", _set_up_sqlite if engine.dialect.name == "sqlite" else _set_up_postgresql)
    return engine


def _set_up_postgresql(connection: Any, record: object) -> None:
    """No query here is worth compiling: that takes a second, and the longest of them less."""
    connection.autocommit = True  # or the setting would end with a transaction that is rolled back
    connection.execute("SET jit = off")
    connection.autocommit = False


def _set_up_sqlite(connection: Any, record: object) -> None:
    """Readers never wait for a writer, and what was committed survives a loss of power."""
    cursor = connection.cursor()
    # The time-out first; and it does not hold for the change to WAL, which two services may make at once.
    for pragma in (f"busy_timeout={BUSY_SECONDS * 1000}", "synchronous=FULL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    end = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            break
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
            time.sleep(0.02)
    cursor.close()
