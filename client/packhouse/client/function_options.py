"""The options of the command line for tokenize functions: those of ``submit`` and ``preview``."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from packhouse.client.errors import InvalidRequest

Tokenize = Annotated[
    str | None,
    typer.Option(help="What makes tokens of records: module:Class that the service allows, or vision."),
]
TokenizeOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--tokenize-option",
        help="Argument of its class, as name=JSON or name=@FILE; may be given again.",
        show_default=False,
    ),
]
FileRoots = Annotated[
    list[str] | None,
    typer.Option(
        "--file-root",
        help="Where files lie that records name, as FOLDER or PREFIX=FOLDER; may be given again.",
        show_default=False,
    ),
]


def function_fields(tokenize: str | None, options: list[str] | None, roots: list[str] | None) -> dict[str, Any]:
    """Return the fields of a ``JobSpec`` that say how a function makes tokens; raise ``InvalidRequest``."""
    if tokenize is None and (options or roots):
        raise InvalidRequest("--tokenize-option and --file-root belong to a tokenize function", "give --tokenize too")
    return {
        "tokenize": tokenize,
        "tokenize_options": dict(map(_option, options or [])),
        "file_roots": dict(map(_root, roots or [])),
    }


def _option(pair: str) -> tuple[str, Any]:
    name, found, text = pair.partition("=")
    if not (name and found):
        raise InvalidRequest(f"the tokenize option {pair!r} is not a pair", "write it as name=JSON or name=@FILE")
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the file of tokenize option {name!r} cannot be read ({error})", "check it") from None
        return name, _json(name, text)
    # A word needs no quotes, as nobody would type them past a shell.
    return name, text if text.isidentifier() and text not in ("true", "false", "null") else _json(name, text)


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"tokenize option {name!r} is not JSON ({error})", "put texts between quotes") from None


def _root(text: str) -> tuple[str, str]:
    """Return prefix and folder; a folder whose name holds '=' is meant where it exists."""
    prefix, found, folder = text.partition("=")
    return (prefix, os.path.abspath(folder)) if found and not os.path.isdir(text) else ("", os.path.abspath(text))
