"""The command ``packhouse explain``: what of a job is in the cache, and why the rest is not."""

import difflib
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from packhouse.client import console
from packhouse.client.api import Client
from packhouse.client.command import AsJson, Url
from packhouse.client.job_options import JobOptions, job_spec, with_job_options
from packhouse.client.wire import Change, Miss
from packhouse.client.wire_cache import show_size
from packhouse.client.wire_explain import Explanation

LINES_SHOWN = 40
"""Lines of a difference between two templates."""


@with_job_options
def explain(
    sources: Annotated[list[str], typer.Argument(help="Files, folders or globs, on the service's machine.")],
    tokenizer: Annotated[str, typer.Option(help="Folder with a tokenizer.json, on the service's machine.")],
    options: JobOptions,
    untrained: Annotated[
        Literal["quarantine", "drop"], typer.Option(help="What happens to a record with no token to be trained.")
    ] = "quarantine",
    scan: Annotated[bool, typer.Option(help="Read sources that are new or have changed, to look at them too.")] = False,
    limit: Annotated[int, typer.Option(min=0, max=10_000, help="Most sources to list.")] = 20,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Say what of a job is in the cache and why the rest is not, before it runs. Takes the options of submit."""
    spec = job_spec(sources, tokenizer, options, untrained=untrained)
    with Client(url) as client, Progress(console=console.err(), transient=True, disable=as_json) as bar:
        task = bar.add_task("looking up", total=None)
        found = client.explain(
            spec,
            scan=scan,
            limit=limit,
            on_progress=lambda now: bar.update(task, total=now.blocks, completed=now.looked_up),
        )
    if as_json:
        typer.echo(found.model_dump_json())
    else:
        _print(found, console.out())


def _print(found: Explanation, out: Console) -> None:
    out.print(Text(f"recipe {found.recipe}: {found.sources:,} sources, looked up in {found.seconds:.2f} s"))
    out.print(Text(f"{found.hits:,} of {found.blocks:,} blocks are hits, {show_size(found.hit_bytes)}", style="green"))
    if found.unscanned:
        fact = f"{found.unscanned:,} sources ({show_size(found.unscanned_bytes)}) are new or have changed"
        out.print(Text(f"{fact}: --scan reads them", style="yellow"))
    print_misses(found.misses, out)
    for one in found.listed:
        reasons = ", ".join(f"{miss.reason} {miss.blocks:,}" for miss in one.misses)
        standing = f"{one.hits:,} of {one.blocks:,} hits ({reasons})" if one.scanned else "not scanned yet"
        out.print(Text(f"  {one.source}: {standing}"))


def print_misses(misses: list[Miss], out: Console) -> None:
    """Print each kind of miss, with the old and the new value of what changed."""
    for miss in misses:
        where = f", compared with recipe {miss.recipe}" if miss.changes else ""
        text = f"{miss.reason}: {miss.blocks:,} blocks, {show_size(miss.bytes)}{where}"
        out.print(Text(text, style="bold"))
        for change in miss.changes:
            for line in _change(change):
                out.print(Text(f"  {line}", style={"-": "red", "+": "green"}.get(line[:1], "")))


def _change(change: Change) -> Iterator[str]:
    """Yield a change in lines: a difference where one of the values has several, else both values side by side."""
    old, new = _shown(change.old), _shown(change.new)
    if "\n" not in old + new:
        yield f"{change.field}: {old} → {new}"
        return
    yield f"{change.field}:"
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), "before", "now", lineterm="", n=1))[2:]
    yield from lines[:LINES_SHOWN]
    if len(lines) > LINES_SHOWN:
        yield f"… and {len(lines) - LINES_SHOWN:,} lines more"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
