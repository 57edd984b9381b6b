"""Who is alive: each service's sign of life in the database, and the jobs and locks that follow from it.

A service that was not seen for the time of a lease is dead to the others, whatever it does: they take its jobs, and
what it still saves of them is refused by the number of its lease. All times are the database's own.
"""

from dataclasses import dataclass

from sqlalchemy import Engine, Select, delete, or_, select, update

from packhouse.service.database import now, upsert
from packhouse.service.tables import JobRow, LockRow, ServiceRow


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to save a job, until another service takes it."""

    job_id: str
    owner: str
    number: int


def alive(lease_seconds: float) -> Select[str]:
    """Return the query for the ids of the services that live.

    A sign of life from the future is none: a clock that was set back would let the dead live as long as it lost.
    """
    return select(ServiceRow.id).where(ServiceRow.seen_at.between(now() - lease_seconds, now() + lease_seconds))


class Signs:
    """The sign of life of one service, and the locks that it holds."""

    def __init__(self, engine: Engine, service: str, name: str, seconds: float) -> None:
        self._engine, self.service, self._name, self._seconds = engine, service, name, seconds

    def enter(self) -> None:
        """Say that this service lives, and that the one before of the same name does not."""
        with self._engine.begin() as connection:
            dead = or_(ServiceRow.name == self._name, ServiceRow.seen_at < now() - 100 * self._seconds)
            connection.execute(delete(ServiceRow).where(dead, ServiceRow.id != self.service))
        self.beat()

    def beat(self) -> None:
        """Give a sign of life."""
        row = {"id": self.service, "name": self._name, "seen_at": now()}
        with self._engine.begin() as connection:
            # Not an update alone: a service that slept for long may have been cleared away.
            connection.execute(upsert(connection, ServiceRow, ["id"]).values(row))

    def leave(self) -> None:
        """Say that this service has ended: others need not wait to take its jobs."""
        with self._engine.begin() as connection:
            connection.execute(update(LockRow).where(LockRow.owner == self.service).values(owner=""))
            connection.execute(delete(ServiceRow).where(ServiceRow.id == self.service))

    def standing(self) -> dict[str, tuple[int, bool]]:
        """Return the jobs that this service owns: number of the lease, and whether someone cancelled it."""
        query = select(JobRow.id, JobRow.lease, JobRow.cancelling).where(JobRow.owner == self.service)
        with self._engine.connect() as connection:
            return {job_id: (number, cancelling) for job_id, number, cancelling in connection.execute(query)}

    def lock(self, name: str) -> bool:
        """Take a lock that no living service holds, this one included; return whether it was free."""
        with self._engine.begin() as connection:
            connection.execute(upsert(connection, LockRow, ["name"], only=()).values(name=name, owner=""))
            free = (LockRow.name == name, LockRow.owner.not_in(alive(self._seconds)))
            return connection.execute(update(LockRow).where(*free).values(owner=self.service)).rowcount == 1

    def unlock(self, name: str) -> None:
        """Give a lock back."""
        with self._engine.begin() as connection:
            held = (LockRow.name == name, LockRow.owner == self.service)
            connection.execute(update(LockRow).where(*held).values(owner=""))
