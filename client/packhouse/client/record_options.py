"""The options of the command line that say how a record becomes tokens."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from packhouse.client.errors import InvalidRequest
from packhouse.client.wire import Form

RecordForm = Annotated[
    Form | None, typer.Option("--format", help="Form of the records; default: recognised from the first ones.")
]
Kind = Annotated[Literal["text", "chat", "tokens"] | None, typer.Option(help="What a record becomes.")]
TextField = Annotated[str, typer.Option(help="Field of a record's text.")]
MessagesField = Annotated[str, typer.Option(help="Field of a record's messages.")]
FieldNames = Annotated[
    list[str] | None,
    typer.Option(help="Another field's name, as prompt=question; may be given again.", show_default=False),
]
Documents = Annotated[Literal["file", "paragraph"], typer.Option(help="What a document of a .txt file is.")]
Template = Annotated[
    str | None, typer.Option(help="Chat template: a file, or internlm2, chatml, llama3, qwen3, deepseek.")
]
TemplateDate = Annotated[str | None, typer.Option(help="The day, YYYY-MM-DD, for a template that asks for today's.")]
Control = Annotated[
    Literal["text", "allow", "reject"] | None,
    typer.Option(help="What a control token written in a record does; default: text in chats, allow in texts."),
]
Loss = Annotated[
    Literal["all", "assistant", "last_turn", "completion"] | None, typer.Option(help="Which tokens are trained.")
]
AddBos = Annotated[bool, typer.Option(help="Start each sample with the beginning-of-sequence id.")]
AddEos = Annotated[bool | None, typer.Option(help="End each sample with the end-of-sequence id.")]
MaxLength = Annotated[int | None, typer.Option(help="Most tokens of a sample.")]
Overflow = Annotated[
    Literal["truncate", "truncate_left", "drop", "split", "error"], typer.Option(help="What happens to longer ones.")
]


def absolute(source: str) -> str:
    """Return a source as the service must be told it: a path from the root, or an address as it is."""
    return source if "://" in source else os.path.abspath(source)


_BUILT_IN = ("internlm2", "chatml", "llama3", "qwen3", "deepseek")


def form_fields(
    form: Form | None, kind: str | None, text_field: str, messages_field: str, pairs: list[str] | None
) -> dict[str, Any]:
    """Return the fields of a ``JobSpec`` that say what records are; raise ``InvalidRequest``."""
    fields = {}
    for pair in pairs or []:
        name, found, value = pair.partition("=")
        if not (name and found and value):
            raise InvalidRequest(f"the field {pair!r} is not a pair", "write it as prompt=question")
        fields[name] = value
    usual = {"text_field": (text_field, "text"), "messages_field": (messages_field, "messages")}
    named = {option: value for option, (value, default) in usual.items() if value != default}
    return {"format": form, "kind": kind, "fields": fields, **named}


def read_template(template: str | None) -> str | None:
    """Return the text of a template's file, or the name of a built-in one; raise ``InvalidRequest``."""
    if template is None or template in _BUILT_IN:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the template {template!r} cannot be read ({error})", "name a text file") from None
