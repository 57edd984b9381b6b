"""Tables of the service's database, as ``migrations.py`` lays them out."""

from enum import StrEnum

from sqlalchemy import BigInteger, Double, ForeignKey, LargeBinary, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Table(DeclarativeBase):
    """Base of the tables."""


class ServiceRow(Table):
    """A running service; dead once it has not been seen for as long as a lease lasts."""

    __tablename__ = "services"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(Text)
    """Its home: a service that starts there knows that the one before is dead."""
    seen_at: Mapped[float] = mapped_column(Double)


class LockRow(Table):
    """Something that one living service does at a time."""

    __tablename__ = "locks"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    owner: Mapped[str] = mapped_column(String(32))


class JobRow(Table):
    """A job; the database itself refuses a second active one with the same key."""

    __tablename__ = "jobs"

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
    version: Mapped[int] = mapped_column(BigInteger)
    """That of ``body``; 0 until it is saved for the first time by this version of the tables."""
    owner: Mapped[str | None] = mapped_column(String(32))
    """The service that runs it."""
    lease: Mapped[int]
    """Times that a service took it; what a former owner saves is refused by it."""
    taken_at: Mapped[float | None] = mapped_column(Double)
    """Since when its owner runs it."""
    submitter: Mapped[str] = mapped_column(String(64))
    """Name of the token that submitted it."""
    priority: Mapped[int]
    """That of its spec."""


class TokenRow(Table):
    """An access token; of those that were not revoked no two have a name. It stays when it is revoked."""

    __tablename__ = "tokens"

    serial: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(8), unique=True)
    name: Mapped[str] = mapped_column(String(64))
    role: Mapped[str] = mapped_column(String(8))
    digest: Mapped[str] = mapped_column(String(64))
    """SHA-256 of what is secret of it."""
    created_at: Mapped[float] = mapped_column(Double)
    expires_at: Mapped[float | None] = mapped_column(Double)
    revoked_at: Mapped[float | None] = mapped_column(Double)


class AuditRow(Table):
    """Something that someone did."""

    __tablename__ = "audit"

    serial: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    at: Mapped[float] = mapped_column(Double)
    actor: Mapped[str] = mapped_column(String(64))
    action: Mapped[str] = mapped_column(String(16))
    subject: Mapped[str] = mapped_column(Text)
    request: Mapped[str] = mapped_column(String(64))


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


class ShardState(StrEnum):
    """Life of a shard in the store: present → evicting → evicted → present, when a job makes it again."""

    PRESENT = "present"
    EVICTING = "evicting"
    EVICTED = "evicted"


class ShardRow(Table):
    """A shard of the store, and one that was evicted."""

    __tablename__ = "shards"

    serial: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    key: Mapped[str] = mapped_column(String(32), unique=True)
    recipe: Mapped[str] = mapped_column(String(32))
    """Digest of its recipe; empty where only the shard was found."""
    bytes: Mapped[int] = mapped_column(BigInteger)
    """Of all its files."""
    used_at: Mapped[float] = mapped_column(Double)
    """When a job needed or made it, or when it was evicted; the uses of a dataset stand in its own row."""
    state: Mapped[str] = mapped_column(String(8))


class Entry:
    """What datasets and plans have in common; after its eviction a row is a trace."""

    serial: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(32), unique=True)
    bytes: Mapped[int] = mapped_column(BigInteger)
    """Of a dataset: of its shards, whoever else has them too."""
    created_at: Mapped[float] = mapped_column(Double)
    used_at: Mapped[float] = mapped_column(Double)
    pinned: Mapped[bool]
    evicted_at: Mapped[float | None] = mapped_column(Double)


class DatasetRow(Entry, Table):
    """A dataset of the store."""

    __tablename__ = "datasets"

    recipe: Mapped[str] = mapped_column(String(32))
    shards: Mapped[int]


class DatasetShardRow(Table):
    """A shard of a dataset; not tied to their rows, since to check a million ties takes longer than to add them."""

    __tablename__ = "dataset_shards"

    dataset: Mapped[int] = mapped_column(primary_key=True)
    shard: Mapped[int] = mapped_column(primary_key=True)


class PlanRow(Entry, Table):
    """A plan of the store."""

    __tablename__ = "plans"


class PlanDatasetRow(Table):
    """A dataset that a plan draws from."""

    __tablename__ = "plan_datasets"

    plan: Mapped[int] = mapped_column(primary_key=True)
    dataset: Mapped[str] = mapped_column(String(32), primary_key=True)
