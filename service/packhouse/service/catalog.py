"""The catalog: jobs and remembered block lists, in a database that several services may share."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Connection, Engine, and_, func, insert, or_, select, text, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.orm import aliased

from packhouse.client.errors import NotFound, PackhouseError, Unavailable
from packhouse.client.wire import Job, JobState, Progress
from packhouse.service.database import among, chunks, now, open_database, upsert
from packhouse.service.leases import Lease, alive
from packhouse.service.tables import BlockListRow, JobRow, RejectedBlockRow

ACTIVE = (JobState.QUEUED, JobState.RUNNING)

_VERSION_GAP = 1 << 20
"""Added to the version of a job that is taken over: its events must be newer than any that was sent unsaved."""


OVERTAKEN = 16
"""Jobs of its submitter that came before, and that a job may pass for each step of its priority."""


class TooManyJobs(PackhouseError):
    """A submitter has as many jobs as it may have."""

    kind = "too-many-jobs"
    status = 429


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
    """What the services must remember when they are gone."""

    def __init__(self, url: str) -> None:
        """Open the database at ``url``, its tables brought up to date; raise ``Unavailable`` or ``InvalidRequest``."""
        self.engine: Engine = open_database(url)

    def close(self) -> None:
        """Give all connections back."""
        self.engine.dispose()

    def ping(self) -> None:
        """Raise ``Unavailable`` unless the database answers."""
        try:
            with self.engine.connect() as connection:
                connection.execute(text("SELECT 1"))
        except SQLAlchemyError as error:
            raise Unavailable(
                f"the database does not answer ({type(error).__name__})", "see the service's log"
            ) from error

    def add(self, job: Job, key: str, quota: int | None = None) -> Job | None:
        """Store a new job; or store nothing and return the active job with the same ``key``.

        Raises ``TooManyJobs`` where its submitter would have more than ``quota`` active ones. On PostgreSQL, jobs that
        one submitter sends at the very same time may not see each other.
        """
        row = {"id": job.id, "key": key, "state": job.state, "cancelling": False, "lease": 0, **_stored(job)}
        row |= {"submitter": job.submitter, "priority": job.spec.priority}
        for _ in range(10):
            try:
                with self.engine.begin() as connection:
                    connection.execute(insert(JobRow).values(row))
                    if quota is not None:
                        _check_quota(connection, job.submitter, quota)
                return None
            except IntegrityError:
                # The twin may end between the two statements: then there is room for the new job.
                if (twin := self._active(key)) is not None:
                    return twin
        raise Unavailable("the job could not be stored beside an identical one", "submit it again")

    def take(self, owner: str, lease_seconds: float, share: int = 1 << 30) -> tuple[Job, Lease, bool] | None:
        """Let ``owner`` run the next job of those that wait or whose owner is dead.

        Submitters with fewer running jobs come first, and those of whom ``owner`` runs ``share`` wait; then age
        decides, where a step of priority counts as ``OVERTAKEN`` jobs: so none waits for ever.

        Returns the job, the lease to save it with and whether it is to be cancelled; None if there is no such job.
        """
        # A service that slept is dead by its row, and still goes on with its own.
        dead = or_(JobRow.owner.is_(None), and_(JobRow.owner.not_in(alive(lease_seconds)), JobRow.owner != owner))
        columns = (JobRow.id, JobRow.lease, JobRow.body, JobRow.cancelling)
        other = aliased(JobRow)
        running = select(func.count()).where(other.state == JobState.RUNNING, other.submitter == JobRow.submitter)
        here = running.where(other.owner == owner).scalar_subquery()
        order = (running.scalar_subquery(), JobRow.serial - OVERTAKEN * JobRow.priority, JobRow.serial)
        query = select(*columns).where(JobRow.state.in_(ACTIVE), dead, here < share).order_by(*order).limit(1)
        while True:
            with self.engine.connect() as connection:
                found = connection.execute(query).first()
            if found is None:
                return None
            job_id, number, body, cancelling = found
            job, lease = _begun(Job.model_validate_json(body)), Lease(job_id, owner, number + 1)
            change = {"owner": owner, "lease": number + 1, "taken_at": now(), "state": job.state, **_stored(job)}
            # Whoever changes the row first has it; cancelling goes through the lease too.
            unchanged = (JobRow.id == job_id, JobRow.lease == number, JobRow.state.in_(ACTIVE))
            with self.engine.begin() as connection:
                if connection.execute(update(JobRow).where(*unchanged).values(change)).rowcount == 1:
                    return job, lease, cancelling

    def save(self, job: Job, lease: Lease) -> bool:
        """Store a new version of a job that runs; return False, and store nothing, if another service has taken it.

        A job that does not run any more has no owner.
        """
        change = {"state": job.state, "owner": lease.owner if job.state is JobState.RUNNING else None, **_stored(job)}
        held = (JobRow.id == job.id, JobRow.owner == lease.owner, JobRow.lease == lease.number)
        with self.engine.begin() as connection:
            return connection.execute(update(JobRow).where(*held).values(change)).rowcount == 1

    def cancel(self, job_id: str) -> Job | None:
        """Cancel a job that waits, or tell the owner of one that runs to end it; return it, or None if it had ended.

        Raises ``NotFound``.
        """
        while not (job := self.job(job_id)).state.final:
            ended = job.model_copy(
                update={"state": JobState.CANCELLED, "finished_at": datetime.now(UTC), "version": job.version + 1}
            )
            with self.engine.begin() as connection:
                waits = (JobRow.id == job_id, JobRow.state == JobState.QUEUED, JobRow.owner.is_(None))
                change = {"state": ended.state, "cancelling": True, **_stored(ended)}
                if connection.execute(update(JobRow).where(*waits).values(change)).rowcount == 1:
                    return ended
                runs = (JobRow.id == job_id, JobRow.state == JobState.RUNNING)
                if connection.execute(update(JobRow).where(*runs).values(cancelling=True)).rowcount == 1:
                    return job
        return None

    def job(self, job_id: str) -> Job:
        """Return a job; raise ``NotFound``."""
        with self.engine.connect() as connection:
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
        with self.engine.connect() as connection:
            return [Job.model_validate_json(body) for body in connection.scalars(query)]

    def versions(self, job_ids: Collection[str]) -> dict[str, tuple[int, JobState]]:
        """Return the saved version and state of those ``job_ids`` that there are."""
        found: dict[str, tuple[int, JobState]] = {}
        with self.engine.connect() as connection:
            for some in chunks(job_ids):
                query = select(JobRow.id, JobRow.version, JobRow.state).where(JobRow.id.in_(some))
                found.update(
                    {job_id: (version, JobState(state)) for job_id, version, state in connection.execute(query)}
                )
        return found

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
        with self.engine.begin() as connection:
            connection.execute(upsert(connection, RejectedBlockRow, ["job_id", "ordinal"]), rows)

    def rejected(self, job_id: str) -> Iterator[RejectedBlock]:
        """Yield the blocks of a job that have rejected records, in the order of its sources."""
        row = RejectedBlockRow
        columns = (row.source, row.offset, row.first_line, row.shard, row.records)
        query = select(*columns).where(row.job_id == job_id).order_by(row.ordinal)
        with self.engine.connect() as connection:
            for values in connection.execute(query):
                yield RejectedBlock(*values)

    def get(self, keys: Collection[str]) -> dict[str, bytes]:
        """Return the remembered block lists of those ``keys`` that have one."""
        found: dict[str, bytes] = {}
        with self.engine.connect() as connection:
            for some in chunks(keys):
                wanted = among(connection, BlockListRow.key, some)
                query = select(BlockListRow.key, BlockListRow.value).where(wanted)
                found.update((key, value) for key, value in connection.execute(query))
        return found

    def put(self, items: dict[str, bytes]) -> None:
        """Remember block lists, all or none of them."""
        if not items:
            return
        # Sorted, so that two services that put the same keys never wait for each other's rows in turn.
        rows = [{"key": key, "value": value} for key, value in sorted(items.items())]
        with self.engine.begin() as connection:
            connection.execute(upsert(connection, BlockListRow, ["key"]), rows)

    def _active(self, key: str) -> Job | None:
        query = select(JobRow.body).where(JobRow.key == key, JobRow.state.in_(ACTIVE))
        with self.engine.connect() as connection:
            body = connection.scalar(query)
        return None if body is None else Job.model_validate_json(body)


def _check_quota(connection: Connection, submitter: str, quota: int) -> None:
    active = select(func.count()).where(JobRow.submitter == submitter, JobRow.state.in_(ACTIVE))
    if int(connection.scalar(active) or 0) > quota:
        raise TooManyJobs(
            f"{submitter!r} has {quota:,} jobs that wait or run, as many as one token may",
            "submit it again when one has ended, or name several sources in one job",
        )


def _stored(job: Job) -> dict[str, str | int]:
    return {"body": job.model_dump_json(), "version": job.version}


def _begun(job: Job) -> Job:
    """Return a job as it begins to run; one that someone has run before begins anew, and its shards will be hits."""
    step = 1 if job.state is JobState.QUEUED else _VERSION_GAP
    fresh = {"state": JobState.RUNNING, "progress": Progress(), "started_at": datetime.now(UTC)}
    return job.model_copy(update={**fresh, "version": job.version + step})
