"""The command ``packhouse preview``: the first records of a job, what is trained of them in colour."""

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from packhouse.client import console
from packhouse.client.api import Client
from packhouse.client.command import AsJson, Url
from packhouse.client.job_options import JobOptions, job_spec, with_job_options
from packhouse.client.wire import Preview, PreviewSample


@with_job_options
def preview(
    source: Annotated[str, typer.Argument(help="File of records, on the service's machine.")],
    tokenizer: Annotated[str, typer.Option(help="Folder with a tokenizer.json, on the service's machine.")],
    options: JobOptions,
    records: Annotated[int, typer.Option(min=1, max=100, help="How many of the first records.")] = 3,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Show what the first records would become: trained tokens in colour, and what is kept out and why."""
    spec = job_spec([source], tokenizer, options)
    with Client(url) as client:
        shown = client.preview(spec, records)
    if as_json:
        typer.echo(shown.model_dump_json())
    else:
        _print(shown, console.out())


def _print(shown: Preview, out: Console) -> None:
    out.print(Text(f"{shown.source}: records of the form {shown.form}, made to {shown.kind}, loss {shown.loss}"))
    for warning in shown.warnings:
        out.print(Text(f"note: {warning}", style="yellow"))
    for sample in shown.samples:
        out.print(
            Text(f"line {sample.line}: {len(sample.ids):,} tokens, {sum(sample.trained):,} trained", style="bold")
        )
        out.print(_coloured(sample, marked=not out.is_terminal))
    for reject in shown.rejected:
        out.print(Text(f"line {reject.line}: kept out, {reject.reason}: {reject.detail}", style="red"))
    out.print(Text(f"dropped {shown.dropped}, truncated {shown.truncated}, split {shown.split}; {shown.seconds:.2f} s"))


def _coloured(sample: PreviewSample, *, marked: bool) -> Text:
    """Return the sample's text, what is trained in green; between marks where there is no colour."""
    text = Text()
    for piece in sample.pieces:
        if piece.trained:
            text.append(f"⟦{piece.text}⟧" if marked else piece.text, style="green")
        else:
            text.append(piece.text, style="dim")
    return text
