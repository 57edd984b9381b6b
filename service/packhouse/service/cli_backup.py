"""The commands ``packhouse backup``, ``restore`` and ``upgrade``: on the service's machine, by its settings."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from packhouse.client import console
from packhouse.client.command import AsJson, show
from packhouse.client.errors import InvalidRequest
from packhouse.client.store import Store, store_at
from packhouse.client.wire import Wire
from packhouse.client.wire_cache import show_size
from packhouse.service.backup import Copied, Tell, back_up
from packhouse.service.backup import restore as bring_back
from packhouse.service.database import engine_of
from packhouse.service.home import locked
from packhouse.service.migrations import SCHEMA_VERSION, found_version, migrate
from packhouse.service.problems import database_trouble
from packhouse.service.settings import Settings
from packhouse.service.store_format import OURS, note_format, read_format

Folder = Annotated[Path, typer.Argument(help="Folder of the backup.")]
Home = Annotated[Path | None, typer.Option(help="Folder of the service's database; default PACKHOUSE_HOME.")]


class Upgrade(Wire):
    """Which versions were found, and which this program has; 0 where there is nothing yet."""

    tables_found: int
    tables: int
    shards_found: int
    shards: int
    plans_found: int
    plans: int
    datasets_lost: int
    """Datasets of another format: nobody can read them, and their jobs make them anew."""
    applied: bool


def backup(
    folder: Folder,
    shards: Annotated[
        bool, typer.Option("--shards", help="The shards too, which their sources could give again.")
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Save the service's database, and datasets and plans of the store; it may run meanwhile.

    A folder that has a backup already gets what is new.
    """
    settings = Settings.load(home=home)
    store = store_at(settings.store)
    with _database(settings, made=False) as engine, _counting("saved", as_json) as tell:
        made = back_up(engine, store, folder.absolute(), shards=shards, tell=tell)
    rows = sum(table.rows for table in made.tables.values())
    table = _facts(made_at=f"{made.made_at.astimezone():%Y-%m-%d %H:%M:%S}", rows=f"{rows:,}", **_copied(made.copied))
    show(made, table, as_json=as_json)


def restore(folder: Folder, home: Home = None, as_json: AsJson = False) -> None:
    """Bring a backup back, into a home whose database is empty and that no service uses."""
    settings = Settings.load(home=home)
    store = store_at(settings.store)
    with locked(settings.home):
        store.check()
        with _database(settings, made=True) as engine, _counting("restored", as_json) as tell:
            done = bring_back(engine, store, folder.absolute(), lease=settings.lease, tell=tell)
        note_format(store)
    found = done.store
    held = {"datasets": f"{found.datasets:,}", "plans": f"{found.plans:,}", "shards": f"{found.shards:,}"}
    show(done, _facts(**_copied(done.copied), **held, shards_missing=f"{found.lost:,}"), as_json=as_json)


def upgrade(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done.")] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Bring the database's tables up to this version, and let it go on with a store of an older format.

    The tables' part happens by itself when a service starts. What is newer than this program is refused.
    """
    settings = Settings.load(home=home)
    store = store_at(settings.store)
    with _database(settings, made=False) as engine:
        with engine.connect() as connection:
            tables = found_version(connection)
        report = _foreseen(store, tables)
        if not dry_run:
            migrate(engine)
            note_format(store)
            report = report.model_copy(update={"applied": True})
    shown = {
        "tables": f"{report.tables_found} → {report.tables}",
        "shards": f"{report.shards_found} → {report.shards}",
        "plans": f"{report.plans_found} → {report.plans}",
        "datasets_lost": f"{report.datasets_lost:,}",
        "applied": "yes" if report.applied else "no",
    }
    show(report, _facts(**shown), as_json=as_json)


def _foreseen(store: Store, tables: int) -> Upgrade:
    """Return what an upgrade would find; raise ``InvalidRequest`` where something is newer than this program."""
    found = read_format(store)
    shards, plans = (0, 0) if found is None else (found.shards, found.plans)
    for what, one, ours in (
        ("the database has tables", tables, SCHEMA_VERSION),
        (f"the store {store.location} has shards", shards, OURS.shards),
        (f"the store {store.location} has plans", plans, OURS.plans),
    ):
        if one > ours:
            fact = f"{what} of version {one} and this program knows {ours}"
            raise InvalidRequest(fact, "use the packhouse version that wrote them")
    lost = 0 if shards in (0, OURS.shards) else sum(1 for name in store.list("datasets") if name.endswith(".json"))
    return Upgrade(
        tables_found=tables,
        tables=SCHEMA_VERSION,
        shards_found=shards,
        shards=OURS.shards,
        plans_found=plans,
        plans=OURS.plans,
        datasets_lost=lost,
        applied=False,
    )


@contextmanager
def _database(settings: Settings, *, made: bool) -> Iterator[Engine]:
    """Open the database as it is, whatever its version; ``made`` says that it may be made."""
    engine = engine_of(settings.database_url)
    file = engine.url.database
    if engine.dialect.name == "sqlite" and not made and not (file and Path(file).exists()):
        raise InvalidRequest(f"there is no database {file}", "set PACKHOUSE_HOME, or --home, to that of the service")
    try:
        yield engine
    except DBAPIError as error:
        raise database_trouble(error) from error
    finally:
        engine.dispose()


@contextmanager
def _counting(word: str, quiet: bool) -> Iterator[Tell]:
    """Show on a terminal how far it is."""
    with console.err().status(word) as status:
        if quiet:
            status.stop()
        yield lambda so_far: status.update(f"{word} {so_far.files:,} files, {show_size(so_far.bytes)}")


def _copied(copied: Copied) -> dict[str, str]:
    facts = {"files": f"{copied.files:,}", "size": show_size(copied.bytes), "there_already": f"{copied.kept:,}"}
    return facts | ({"damaged_shards_left_out": f"{copied.damaged:,}"} if copied.damaged else {})


def _facts(**facts: str) -> Table:
    table = console.facts()
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), value)
    return table
