"""Tables of the service's database, the same on SQLite and PostgreSQL."""

from sqlalchemy import BigInteger, ForeignKey, Index, LargeBinary, String, Text, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

SCHEMA_VERSION = 1

_ACTIVE = text("state IN ('queued', 'running')")


class Table(DeclarativeBase):
    """Base of the tables."""


class SchemaRow(Table):
    """The version of these tables, in one row."""

    __tablename__ = "schema_version"

    version: Mapped[int] = mapped_column(primary_key=True)


class JobRow(Table):
    """A job; the database itself refuses a second active one with the same key."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index("jobs_active_key", "key", unique=True, sqlite_where=_ACTIVE, postgresql_where=_ACTIVE),
        Index("jobs_state", "state", "serial"),
    )

    serial: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    """Order of arrival."""
    id: Mapped[str] = mapped_column(String(32), unique=True)
    key: Mapped[str] = mapped_column(String(32))
    """Digest of what is asked for: the spec without its name, and the recipe."""
    state: Mapped[str] = mapped_column(String(16))
    cancelling: Mapped[bool]
    """Whether someone asked to cancel it: this must outlive the process that was asked."""
    body: Mapped[str] = mapped_column(Text)
    """The job as JSON (``wire.Job``)."""


class RejectedBlockRow(Table):
    """A block of a job with records in quarantine, and where the block lies in its source."""

    __tablename__ = "rejected_blocks"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    ordinal: Mapped[int] = mapped_column(primary_key=True)
    source: Mapped[str] = mapped_column(Text)
    offset: Mapped[int] = mapped_column(BigInteger)
    first_line: Mapped[int] = mapped_column(BigInteger)
    shard: Mapped[str] = mapped_column(String(32))
    records: Mapped[int]


class BlockListRow(Table):
    """The remembered block list of a source; key and value belong to the worker."""

    __tablename__ = "block_index"

    key: Mapped[str] = mapped_column(Text, primary_key=True)
    value: Mapped[bytes] = mapped_column(LargeBinary)
