"""The options that say how a job makes tokens: declared once, for ``submit``, ``preview`` and ``explain`` alike."""

import inspect
import os
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from packhouse.client.command import request
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
from packhouse.client.wire import JobSpec

JobOptions = Mapping[str, Any]
"""What a command was given of these options, by name."""


def _fields(
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
) -> dict[str, Any]:
    """Return the fields of a ``JobSpec`` that the options make."""
    return {
        **form_fields(form, kind, text_field, messages_field, field),
        "documents": documents,
        "template": read_template(template),
        "template_date": template_date,
        "control_tokens": control_tokens,
        "loss": loss,
        "add_bos": add_bos,
        "add_eos": add_eos,
        "max_length": max_length,
        "overflow": overflow,
        **function_fields(tokenize, tokenize_option, file_root),
    }


def with_job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with these options in place of its parameter ``options``, which gets what was given."""
    shared, own = inspect.signature(_fields).parameters, inspect.signature(command).parameters

    @wraps(command)
    def run(**given: Any) -> None:
        command(options={name: given.pop(name) for name in shared}, **given)

    parameters = [one for name, own_one in own.items() for one in (shared.values() if name == "options" else [own_one])]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def job_spec(sources: list[str], tokenizer: str, options: JobOptions, **more: Any) -> JobSpec:
    """Return the job that a command describes, with ``more`` of its fields; raise ``InvalidRequest``."""
    return request(
        JobSpec,
        sources=[absolute(source) for source in sources],
        tokenizer=os.path.abspath(tokenizer),
        **_fields(**options),
        **more,
    )
