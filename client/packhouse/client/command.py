"""What the commands share: their common options, requests from options, and how results are printed."""

import json
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError
from rich.table import Table

from packhouse.client import console
from packhouse.client.errors import InvalidRequest

Url = Annotated[str | None, typer.Option("--url", help="The service; default PACKHOUSE_URL or this machine.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON only.")]

M = TypeVar("M", bound=BaseModel)


def request(model: type[M], **fields: Any) -> M:
    """Return the request that options make; raise ``InvalidRequest`` with every fault of theirs."""
    try:
        return model(**fields)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        raise InvalidRequest("; ".join(faults), "see --help") from None


def show(value: BaseModel | Iterable[BaseModel], table: Table, *, as_json: bool) -> None:
    """Print a result: as JSON, or the table that shows it."""
    if not as_json:
        console.out().print(table)
    elif isinstance(value, BaseModel):
        typer.echo(value.model_dump_json())
    else:
        typer.echo(json.dumps([one.model_dump(mode="json") for one in value]))
