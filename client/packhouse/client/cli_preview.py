"""The command ``packhouse preview``: the first records of a job, what is trained of them in colour."""

import os
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from packhouse.client import console
from packhouse.client.api import Client
from packhouse.client.command import AsJson, Url, request
from packhouse.client.function_options import FileRoots, Tokenize, TokenizeOptions, function_fields
from packhouse.client.record_options import (
    AddBos,
    AddEos,
    Control,
    Documents,
    FieldNames,
    Kind,
    Loss,
    MaxLength,
    MessagesField,
    Overflow,
    RecordForm,
    Template,
    TemplateDate,
    TextField,
    absolute,
    form_fields,
    read_template,
)
from packhouse.client.wire import JobSpec, Preview, PreviewSample


def preview(
    source: Annotated[str, typer.Argument(help="File of records, on the service's machine.")],
    tokenizer: Annotated[str, typer.Option(help="Folder with a tokenizer.json, on the service's machine.")],
    records: Annotated[int, typer.Option(min=1, max=100, help="How many of the first records.")] = 3,
    form: RecordForm = None,
    kind: Kind = None,
    text_field: TextField = "text",
    messages_field: MessagesField = "messages",
    field: FieldNames = None,
    documents: Documents = "file",
    template: Template = None,
    template_date: TemplateDate = None,
    control_tokens: Control = None,
    loss: Loss = None,
    add_bos: AddBos = False,
    add_eos: AddEos = None,
    max_length: MaxLength = None,
    overflow: Overflow = "truncate",
    tokenize: Tokenize = None,
    tokenize_option: TokenizeOptions = None,
    file_root: FileRoots = None,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Show what the first records would become: trained tokens in colour, and what is kept out and why."""
    spec = request(
        JobSpec,
        sources=[absolute(source)],
        tokenizer=os.path.abspath(tokenizer),
        **form_fields(form, kind, text_field, messages_field, field),
        documents=documents,
        template=read_template(template),
        template_date=template_date,
        control_tokens=control_tokens,
        loss=loss,
        add_bos=add_bos,
        add_eos=add_eos,
        max_length=max_length,
        overflow=overflow,
        **function_fields(tokenize, tokenize_option, file_root),
    )
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
