"""The command ``packhouse cache verify``: read every stored file again."""

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from packhouse.client import console
from packhouse.client.command import AsJson, Url
from packhouse.client.connection import Connection, parse
from packhouse.client.errors import Damaged, Unavailable
from packhouse.client.wire_verify import VerifyReport, VerifySpec

QUIET_SECONDS = 600.0
"""How long the service may read without a word: a file of a slow store takes its time."""


def verify_steps(url: str | None, spec: VerifySpec) -> Iterator[VerifyReport]:
    """Yield how far the service is with a check, the last time when it is done; raise ``Unavailable`` if it stops."""
    connection = Connection(url, None, QUIET_SECONDS)
    try:
        with connection.stream("POST", "/v1/cache/verify", json=spec.model_dump(mode="json")) as response:
            for line in response.iter_lines():
                yield (report := parse(VerifyReport, line))
                if report.done:
                    return
    finally:
        connection.close()
    raise Unavailable("the service ended the check", "see its log, and run it again")


def verify(
    shard: Annotated[list[str] | None, typer.Option(help="Key of a shard; without any, everything.")] = None,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Read every stored file again; move damaged ones aside, so that the next job builds them anew.

    Exits with 1 where something was damaged. With --json each line says how far it is.
    """
    report = VerifyReport()
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    with Progress(*columns, console=console.err(), transient=True, disable=as_json) as bar:
        task = bar.add_task("verifying", total=1.0)
        for report in verify_steps(url, VerifySpec(shards=shard or [])):
            bar.update(task, completed=report.share, description=f"{report.shards:,} shards")
            if as_json:
                typer.echo(report.model_dump_json())
            elif report.finding is not None:
                where = f" (moved to {report.finding.moved})" if report.finding.moved else ""
                console.out().print(f"{report.finding.fault:10} {report.finding.file}{where}")
    if not as_json:
        left = f", {report.unfinished:,} without a receipt" if report.unfinished else ""
        read = f"{report.shards:,} shards{left}, {report.datasets:,} datasets, {report.bytes / 1e6:,.1f} MB"
        console.err().print(f"verified {read}: {report.damaged:,} damaged")
    if report.damaged:
        raise Damaged(
            f"{report.damaged:,} stored files were damaged", "run the jobs that need them again: only those are rebuilt"
        )
