"""How the service's database bears a million shards: what a request waits for, on SQLite and on PostgreSQL.

The shards are made up, in datasets of 100,000 that were used one day after the other; the store holds none of them, so
that what is measured is the catalog alone.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from sqlalchemy import text

from packhouse.client.digest import digest_json
from packhouse.client.format import FileInfo, Manifest, Receipt
from packhouse.client.store import LocalStore
from packhouse.client.wire import Job, JobSpec, JobState, Progress
from packhouse.service.catalog import Catalog
from packhouse.service.inventory import Inventory
from packhouse.service.keep import Keep
from packhouse.service.leases import Signs
from packhouse.service.space import Space

DATASET = 100_000
SHARD_BYTES = 20_000_000
LEASE = 20.0


def main() -> None:
    """Print a table and write JSON beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=1_000_000)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], action="append")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args()
    results = {kind: measure(kind, options.shards) for kind in options.database or ["sqlite", "postgresql"]}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "catalog.json").write_text(json.dumps({"shards": options.shards, **results}, indent=2) + "\n")
    table = Table("seconds", *results, title=f"a catalog of {options.shards:,} shards")
    for name in next(iter(results.values())):
        table.add_row(name, *(f"{result[name]:,.3f}" for result in results.values()))
    Console().print(table)


def measure(kind: str, shards: int) -> dict[str, float]:
    """Return the seconds of each step, and the peak memory of this process."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        catalog = stack.enter_context(closing(Catalog(_url(kind, folder, stack))))
        inventory = Inventory(catalog.engine, lease=LEASE)
        signs = Signs(catalog.engine, "bench", "bench", LEASE)
        signs.enter()
        space = Space(inventory, LocalStore(folder / "store"), signs, keep=Keep(recent=0, plans=0))
        seconds: dict[str, float] = {}

        def timed(name: str, call: Callable[[], Any]) -> Any:
            begun = time.perf_counter()
            value = call()
            seconds[name] = time.perf_counter() - begun
            return value

        fill(catalog, inventory, shards, timed)
        steps(catalog, inventory, space, shards, timed)
        seconds["peak memory of this process, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
        return seconds


def fill(catalog: Catalog, inventory: Inventory, shards: int, timed: Callable[..., Any]) -> None:
    """Add the datasets, the oldest first, and what is remembered of their blocks."""
    for number in range(shards // DATASET):
        manifest = made_up(number)
        timed("add a dataset of 100,000 shards, at last", lambda manifest=manifest: inventory.add_manifest(manifest))
        catalog.put({f"seen:{receipt.key}": b"recipe" for receipt in manifest.shards})
        for table in ("shards", "datasets"):
            with catalog.engine.begin() as connection:
                connection.execute(text(f"UPDATE {table} SET used_at = used_at - 86400"))
    if catalog.engine.dialect.name == "postgresql":
        with catalog.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("VACUUM ANALYZE"))  # as its autovacuum does


def steps(catalog: Catalog, inventory: Inventory, space: Space, shards: int, timed: Callable[..., Any]) -> None:
    """Do what requests and jobs do."""
    keys = [receipt.key for receipt in made_up(0).shards]
    timed("submit and begin a job", lambda: _job(catalog))
    timed("look up 10,000 blocks (explain, a warm job)", lambda: catalog.get([f"seen:{key}" for key in keys[:10_000]]))
    timed("keep 10,000 shards for a job", lambda: inventory.need(keys[:10_000]))
    first, second = made_up(0).id, made_up(1).id
    timed("note the use of a dataset of 100,000", lambda: inventory.use(datasets=[second]))
    timed("GET /v1/cache", space.usage)
    timed("GET /v1/cache/entries", lambda: inventory.entries(None, 1000))
    total = shards * SHARD_BYTES
    timed("gc dry run, first answer", lambda: next(space.gc(total // 2, dry_run=True)))
    timed("gc dry run, half of it", lambda: list(space.gc(total // 2, dry_run=True)))
    inventory.pin(first, True)
    timed("gc dry run, all but a pinned dataset", lambda: list(space.gc(0, dry_run=True)))
    timed("gc, first answer", lambda: _first(space.gc(total // 2)))
    timed("gc of 10,000 shards", lambda: list(space.gc(inventory.size() - 10_000 * SHARD_BYTES)))


def made_up(number: int) -> Manifest:
    """Return the manifest of a dataset that nobody made."""
    info, none = FileInfo(SHARD_BYTES // 2, "0" * 32), FileInfo(SHARD_BYTES // 2, "0" * 32)
    receipts = (Receipt(digest_json([number, at]), 1, 1, 1, 1, 1, info, none) for at in range(DATASET))
    return Manifest({"number": number % 3}, 1000, tuple(receipts))


def _first(found: Iterator[Any]) -> Any:
    first = next(found)
    found.close()  # type: ignore[attr-defined]
    return first


def _job(catalog: Catalog) -> None:
    spec = JobSpec(sources=["/a"], tokenizer="/t")
    now = datetime.now(UTC)
    job = Job(id="j", state=JobState.QUEUED, spec=spec, recipe="r", version=1, progress=Progress(), created_at=now)
    catalog.add(job, "k")
    taken = catalog.take("bench", LEASE)
    assert taken is not None
    assert catalog.save(taken[0], taken[1])


def _url(kind: str, folder: Path, stack: ExitStack) -> str:
    if kind == "sqlite":
        return f"sqlite:///{folder}/packhouse.db"
    import sys

    sys.path.append(str(Path(__file__).parents[2]))
    from tests.postgres import server

    return stack.enter_context(server())()


if __name__ == "__main__":
    main()
