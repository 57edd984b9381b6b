"""The catalog: jobs and remembered block lists, in a database."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, func, insert, inspect, select, text, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError

from packhouse.client.errors import InvalidRequest, NotFound, Unavailable
from packhouse.client.wire import Job, JobState
from packhouse.service.tables import (
    SCHEMA_VERSION,
    BlockListRow,
    JobRow,
    RejectedBlockRow,
    SchemaRow,
    Table,
)

log = logging.getLogger(__name__)

ACTIVE = (JobState.QUEUED, JobState.RUNNING)


@dataclass(frozen=True, slots=True)
class RejectedBlock:
    """A block with records in quarantine: ``shard``'s sidecar counts rows and bytes from here."""

    source: str
    offset: int
    """Bytes from the start of the source."""
    first_line: int
    """Number of the block's first line in the source, from 0."""
    shard: str
    records: int


class Catalog:
    """What the service must remember when it is gone."""

    def __init__(self, url: str) -> None:
        """Open the database at ``url`` and lay out its tables; raise ``Unavailable`` or ``InvalidRequest``."""
        self._engine = _engine(url)
        try:
            with self._engine.begin() as connection:
                _lay_out(connection)
        except DBAPIError as error:
            raise Unavailable(
                f"the database {self._engine.url!r} cannot be opened ({error.orig})",
                "check PACKHOUSE_DATABASE_URL, or that the folder can be written",
            ) from error

    def close(self) -> None:
        """Give all connections back."""
        self._engine.dispose()

    def ping(self) -> None:
        """Raise ``Unavailable`` unless the database answers."""
        try:
            with self._engine.connect() as connection:
                connection.execute(text("SELECT 1"))
        except SQLAlchemyError as error:
            raise Unavailable(
                f"the database does not answer ({type(error).__name__})", "see the service's log"
            ) from error

    def add(self, job: Job, key: str) -> Job | None:
        """Store a new job; or store nothing and return the active job with the same ``key``."""
        row = {"id": job.id, "key": key, "state": job.state, "cancelling": False, "body": job.model_dump_json()}
        for _ in range(10):
            try:
                with self._engine.begin() as connection:
                    connection.execute(insert(JobRow).values(row))
                return None
            except IntegrityError:
                # The twin may end between the two statements: then there is room for the new job.
                if (twin := self._active(key)) is not None:
                    return twin
        raise Unavailable("the job could not be stored beside an identical one", "submit it again")

    def save(self, job: Job, *, cancelling: bool = False) -> None:
        """Store a new version of a job."""
        change = {"state": job.state, "cancelling": cancelling, "body": job.model_dump_json()}
        with self._engine.begin() as connection:
            connection.execute(update(JobRow).where(JobRow.id == job.id).values(change))

    def job(self, job_id: str) -> Job:
        """Return a job; raise ``NotFound``."""
        with self._engine.connect() as connection:
            body = connection.scalar(select(JobRow.body).where(JobRow.id == job_id))
        if body is None:
            raise NotFound(f"there is no job {job_id!r}", "'packhouse jobs' lists them")
        return Job.model_validate_json(body)

    def jobs(self, *, state: JobState | None = None, before: str | None = None, limit: int = 100) -> list[Job]:
        """Return jobs, newest first; with ``before``, those older than that job."""
        query = select(JobRow.body).order_by(JobRow.serial.desc()).limit(limit)
        if state is not None:
            query = query.where(JobRow.state == state)
        if before is not None:
            query = query.where(JobRow.serial < select(JobRow.serial).where(JobRow.id == before).scalar_subquery())
        with self._engine.connect() as connection:
            return [Job.model_validate_json(body) for body in connection.scalars(query)]

    def unfinished(self) -> list[tuple[Job, bool]]:
        """Return the active jobs, oldest first, each with whether it is to be cancelled."""
        query = select(JobRow.body, JobRow.cancelling).where(JobRow.state.in_(ACTIVE)).order_by(JobRow.serial)
        with self._engine.connect() as connection:
            return [(Job.model_validate_json(body), cancelling) for body, cancelling in connection.execute(query)]

    def keep_rejected(self, job_id: str, blocks: list[RejectedBlock]) -> None:
        """Remember where the rejected records of a job lie."""
        if not blocks:
            return
        rows = [
            {
                "job_id": job_id,
                "ordinal": ordinal,
                "source": block.source,
                "offset": block.offset,
                "first_line": block.first_line,
                "shard": block.shard,
                "records": block.records,
            }
            for ordinal, block in enumerate(blocks)
        ]
        with self._engine.begin() as connection:
            connection.execute(_upsert(connection, RejectedBlockRow, ["job_id", "ordinal"]), rows)

    def rejected(self, job_id: str) -> Iterator[RejectedBlock]:
        """Yield the blocks of a job that have rejected records, in the order of its sources."""
        row = RejectedBlockRow
        columns = (row.source, row.offset, row.first_line, row.shard, row.records)
        query = select(*columns).where(row.job_id == job_id).order_by(row.ordinal)
        with self._engine.connect() as connection:
            for values in connection.execute(query):
                yield RejectedBlock(*values)

    def get(self, keys: list[str]) -> dict[str, bytes]:
        """Return the remembered block lists of those ``keys`` that have one."""
        found: dict[str, bytes] = {}
        with self._engine.connect() as connection:
            for some in _chunks(keys):
                query = select(BlockListRow.key, BlockListRow.value).where(BlockListRow.key.in_(some))
                found.update((key, value) for key, value in connection.execute(query))
        return found

    def put(self, items: dict[str, bytes]) -> None:
        """Remember block lists, all or none of them."""
        if not items:
            return
        rows = [{"key": key, "value": value} for key, value in items.items()]
        with self._engine.begin() as connection:
            connection.execute(_upsert(connection, BlockListRow, ["key"]), rows)

    def _active(self, key: str) -> Job | None:
        query = select(JobRow.body).where(JobRow.key == key, JobRow.state.in_(ACTIVE))
        with self._engine.connect() as connection:
            body = connection.scalar(query)
        return None if body is None else Job.model_validate_json(body)


def _engine(url: str) -> Engine:
    try:
        engine = create_engine(make_url(url), pool_pre_ping=True)
    except (SQLAlchemyError, ImportError) as error:
        raise InvalidRequest(f"the database URL cannot be used ({error})", "set PACKHOUSE_DATABASE_URL") from error
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
    return engine


def _set_up_sqlite(connection: Any, record: object) -> None:
    """Readers never wait for a writer, and what was committed survives a loss of power."""
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=10000", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _lay_out(connection: Connection) -> None:
    fresh = not inspect(connection).has_table(SchemaRow.__tablename__)
    if fresh:
        Table.metadata.create_all(connection)
        connection.execute(insert(SchemaRow).values(version=SCHEMA_VERSION))
    version = connection.scalar(select(func.max(SchemaRow.version)))
    if version != SCHEMA_VERSION:
        raise InvalidRequest(
            f"the database has tables of version {version} and this program knows version {SCHEMA_VERSION}",
            "use the packhouse version that wrote it, or another PACKHOUSE_DATABASE_URL",
        )


def _upsert(connection: Connection, table: type[Table], keys: list[str]) -> Any:
    """Return an insert that replaces the row with the same ``keys``."""
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    statement = dialect.insert(table)
    changed = {
        column.name: statement.excluded[column.name] for column in table.__table__.columns if column.name not in keys
    }
    return statement.on_conflict_do_update(index_elements=keys, set_=changed)


def _chunks(keys: list[str], size: int = 1000) -> Iterator[list[str]]:
    """Cut ``keys`` into lists that fit the number of variables a database takes in one statement."""
    rest = iter(keys)
    while some := list(islice(rest, size)):
        yield some
