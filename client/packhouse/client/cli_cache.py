"""The commands ``packhouse cache``: what the store holds, what stays, and what goes to make room."""

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.progress import Progress, TextColumn
from rich.table import Table

from packhouse.client import console
from packhouse.client.api import Client
from packhouse.client.cli_verify import verify
from packhouse.client.command import AsJson, Url, show
from packhouse.client.errors import InvalidRequest
from packhouse.client.wire_cache import (
    CacheEntry,
    CacheUsage,
    GcReport,
    RescanReport,
    parse_size,
    show_size,
)

cache_app = typer.Typer(
    help="What the store holds; make room, and say what stays.", no_args_is_help=True, rich_markup_mode=None
)

EntryIds = Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of datasets or plans.")]

cache_app.command("verify")(verify)


@cache_app.command("ls")
def list_entries(
    evicted: Annotated[bool, typer.Option("--evicted", help="Also what was evicted.")] = False,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """List datasets and plans, those used longest ago first: they go first."""
    with Client(url) as client:
        usage = client.cache.usage()
        found = [entry for entry in client.cache.entries() if evicted or entry.evicted_at is None]
    found.sort(key=lambda entry: (entry.used_at, entry.id))
    show(found, _entries(found), as_json=as_json)
    if not as_json:
        console.out().print(_usage(usage))


@cache_app.command("usage")
def show_usage(as_json: AsJson = False, url: Url = None) -> None:
    """Show what the store holds, by recipe."""
    with Client(url) as client:
        usage = client.cache.usage()
    show(usage, _usage(usage), as_json=as_json)


@cache_app.command("gc")
def gc(
    budget: Annotated[
        str | None, typer.Option(help="What may stay, such as 500GB; without it the service's own budget.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and let it stay.")] = False,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Evict what was used longest ago until the store fits. What is needed, pinned or young stays; so do sources."""
    size = None if budget is None else parse_size(budget)
    with Client(url) as client:
        report = _last_gc(client.cache.gc(size, dry_run=dry_run))
    show(report, _gc(report), as_json=as_json)


@cache_app.command("pin")
def pin(entry_ids: EntryIds, as_json: AsJson = False, url: Url = None) -> None:
    """Let datasets or plans stay, and all that they need."""
    with Client(url) as client:
        found = [client.cache.pin(one) for one in entry_ids]
    show(found, _entries(found), as_json=as_json)


@cache_app.command("unpin")
def unpin(entry_ids: EntryIds, as_json: AsJson = False, url: Url = None) -> None:
    """Let datasets or plans go when their time comes."""
    with Client(url) as client:
        found = [client.cache.unpin(one) for one in entry_ids]
    show(found, _entries(found), as_json=as_json)


@cache_app.command("rm")
def remove(
    entry_ids: EntryIds,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Remove datasets, with the shards that only they have, or plans. The sources stay."""
    if not yes:
        if as_json:
            raise InvalidRequest("nobody can be asked where JSON is printed", "add --yes")
        typer.confirm(f"Remove {', '.join(entry_ids)}?", abort=True, err=True)
    with Client(url) as client:
        reports = [_last_gc(client.cache.remove(one)) for one in entry_ids]
    for report in reports if not as_json else []:
        console.out().print(_gc(report))
    if as_json:
        show(reports, Table(), as_json=True)


@cache_app.command("rescan")
def rescan(as_json: AsJson = False, url: Url = None) -> None:
    """Let the service look again what its store holds: after its database was lost, or files were moved by hand."""
    with Client(url) as client, _progress() as bar:
        task = bar.add_task("")
        for report in client.cache.rescan():
            bar.update(task, description=f"{report.datasets:,} datasets, {report.shards:,} shards")
    show(report, _rescan(report), as_json=as_json)


def _last_gc(steps: Iterator[GcReport]) -> GcReport:
    with _progress() as bar:
        task = bar.add_task("")
        for report in steps:
            bar.update(task, description=f"{report.shards:,} shards, {show_size(report.freed)}")
    return report


def _progress() -> Progress:
    errors = console.err()
    return Progress(TextColumn("{task.description}"), console=errors, transient=True, disable=not errors.is_terminal)


def _entries(entries: list[CacheEntry]) -> Table:
    table = console.listing("id", "kind", "size", "shards", "last used", "stays", folded=("id",))
    for one in entries:
        stays = f"evicted {one.evicted_at.astimezone():%m-%d %H:%M}" if one.evicted_at else "pinned" * one.pinned
        used = f"{one.used_at.astimezone():%Y-%m-%d %H:%M}"
        table.add_row(one.id, one.kind, show_size(one.bytes), f"{one.shards:,}" if one.shards else "", used, stays)
    return table


def _usage(usage: CacheUsage) -> Table:
    table = console.facts()
    budget = "no budget" if usage.budget is None else f"budget {show_size(usage.budget)}"
    table.add_row("store", f"{show_size(usage.bytes)}, {budget}")
    table.add_row("datasets", f"{usage.datasets:,}, of {usage.shards:,} shards")
    table.add_row("plans", f"{usage.plans:,}, {show_size(usage.plan_bytes)}")
    for one in usage.recipes:
        name = f"recipe {one.recipe[:12]}" if one.recipe else "no dataset"
        table.add_row(name, f"{show_size(one.bytes)}, {one.shards:,} shards, {one.datasets:,} datasets")
    return table


def _gc(report: GcReport) -> Table:
    table = console.facts()
    freed = f"{show_size(report.freed)} of {show_size(report.bytes)}"
    table.add_row("would be freed" if report.dry_run else "freed", freed)
    table.add_row("shards", f"{report.shards:,}, of {report.datasets:,} datasets")
    table.add_row("plans", f"{report.plans:,}")
    for one in report.examples[:20]:
        table.add_row("", one)
    if report.over:
        table.add_row("still over", f"{show_size(report.over)}: what is left is needed, pinned or young")
    return table


def _rescan(report: RescanReport) -> Table:
    table = console.facts()
    table.add_row("datasets", f"{report.datasets:,}")
    table.add_row("plans", f"{report.plans:,}")
    table.add_row("shards", f"{report.shards:,}: {report.found:,} of no dataset, {report.lost:,} no longer there")
    for one in report.damaged:
        table.add_row("damaged", one)
    return table
