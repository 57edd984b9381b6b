"""Forgetting: what was evicted long ago leaves the catalog, so that it grows with the store and not with time."""

from sqlalchemy import Engine, delete, exists, select

from packhouse.service.database import CHUNK, chunks, now
from packhouse.service.tables import DatasetRow, DatasetShardRow, PlanDatasetRow, PlanRow, ShardRow, ShardState

TRACE_SECONDS = 30 * 24 * 3600.0
"""How long it is told of something that it was evicted, and not that it never was."""


def forget(engine: Engine, trace: float = TRACE_SECONDS) -> None:
    """Remove what ties evicted datasets to shards, and the traces of what was evicted ``trace`` seconds ago.

    Each step is a short transaction, since others want to write meanwhile.
    """
    _untie(engine)
    old = now() - trace
    with engine.begin() as connection:
        plans = select(PlanRow.serial).where(PlanRow.evicted_at < old)
        connection.execute(delete(PlanDatasetRow).where(PlanDatasetRow.plan.in_(plans)))
        for table in (PlanRow, DatasetRow):
            connection.execute(delete(table).where(table.evicted_at < old, ~table.pinned))
    gone = (ShardRow.state == ShardState.EVICTED, ShardRow.used_at < old)
    with engine.connect() as connection:
        serials = connection.scalars(select(ShardRow.serial).where(*gone)).all()
    for some in chunks(serials):
        with engine.begin() as connection:  # asked again: a job may have made one meanwhile
            connection.execute(delete(ShardRow).where(ShardRow.serial.in_(some), *gone))


def _untie(engine: Engine) -> None:
    """Remove the ties of evicted datasets: a job that makes one of them again ties it anew."""
    tied = exists().where(DatasetShardRow.dataset == DatasetRow.serial)
    with engine.connect() as connection:
        datasets = connection.scalars(select(DatasetRow.serial).where(DatasetRow.evicted_at.is_not(None), tied)).all()
    for dataset in datasets:
        evicted = select(DatasetRow.serial).where(DatasetRow.serial == dataset, DatasetRow.evicted_at.is_not(None))
        some = select(DatasetShardRow.shard).where(DatasetShardRow.dataset == dataset).limit(CHUNK)
        removed = CHUNK
        while removed == CHUNK:
            with engine.begin() as connection:
                # Its row is locked first: who makes the dataset whole again waits, or is not disturbed.
                connection.execute(evicted.with_for_update())
                ties = (DatasetShardRow.dataset.in_(evicted), DatasetShardRow.shard.in_(some))
                removed = connection.execute(delete(DatasetShardRow).where(*ties)).rowcount
