"""Tokenize functions: what turns a record into ids and labels in place of the built-in forms, and how it is loaded.

Only modules that the operator lists are ever imported for a request, and only classes that such a module defines.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Any, Literal, Protocol, Self, runtime_checkable

from packhouse.client.digest import canonical_json
from packhouse.client.errors import InvalidRequest, PackhouseError
from packhouse.client.extra import struct_type
from packhouse.worker.sources import Fingerprint

BUILT_IN = {"vision": "packhouse.worker.vision:VisionChat"}
"""Functions that come with packhouse, by the name that a job may give instead of module and class."""
SETTING = "PACKHOUSE_TOKENIZE_MODULES"


@dataclass(frozen=True, slots=True)
class File:
    """A file that a record names."""

    name: str
    """As the record has it."""
    path: str
    digest: str
    """xxh3-128 of its bytes."""
    fingerprint: Fingerprint | None = None
    """What tells that it is still the file that was digested."""
    problem: str = ""
    """Why it cannot be used, or nothing."""


class TokenizeFn(Protocol):
    """Turns a record into tokens. The class is made with the job's ``tokenize_options`` as keyword arguments.

    A parameter called ``tokenizer`` is given the job's tokenizer, as transformers has it, with the chat template that
    the job states or the tokenizer brings. A class may also have

    - ``extra``, a mapping from names to types (``int64``, ``string``, ``list<float32>``, …): what ``__call__`` returns
      under these names is kept beside the tokens;
    - ``files(record)``, the names of files that the result depends on: ``__call__`` is then given ``(record, files)``,
      a ``File`` for each name, and a file with other bytes gives another shard.
    """

    state: Literal["cache", "runtime"]
    """``cache`` on the worker; ``runtime`` where a data set calls it, with an ``Extra`` in place of the record."""

    def __call__(self, record: dict[str, Any], /) -> Mapping[str, Any]:
        """Return ``input_ids`` and ``labels``, equally long; a label is its id, or -100 where that is not trained.

        The same record must give the same result. Whatever is raised keeps the record out: a ``BadRecord`` under its
        reason, anything else as ``tokenize_error``.
        """

    def hash(self) -> str:
        """Return what stands for all that decides the result, code included; the same in every process."""


@runtime_checkable
class NamesFiles(Protocol):
    """A function whose result depends on files."""

    def files(self, record: dict[str, Any], /) -> Iterable[str]:
        """Return the names of the files that the record's result depends on."""


@dataclass(frozen=True, slots=True)
class Custom:
    """A tokenize function as a recipe knows it: enough to make it again, and all that its results depend on."""

    name: str
    """Module and class."""
    options: str
    """Keyword arguments of the class, as canonical JSON."""
    hash: str
    extra: tuple[tuple[str, str], ...] = ()
    """Names and types of its extra columns."""
    files: bool = False
    """Whether its results depend on files."""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Build from the JSON form."""
        options = canonical_json(value["options"]).decode()
        return cls(**{**value, "options": options, "extra": tuple(sorted(value["extra"].items()))})

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "options": json.loads(self.options),
            "hash": self.hash,
            "extra": dict(self.extra),
            "files": self.files,
        }


def check_module(name: str, modules: Collection[str]) -> str:
    """Return module and class of the function ``name``; raise ``InvalidRequest`` unless it may be imported.

    ``modules`` are those that the operator allows, by their full names. Nothing is imported.
    """
    full = BUILT_IN.get(name, name)
    module, found, kind = full.partition(":")
    if not (module and found and kind.isidentifier()):
        known = ", ".join(repr(one) for one in BUILT_IN)
        raise InvalidRequest(f"tokenize {name!r} names no function", f"write it as module:Class, or use {known}")
    if full not in BUILT_IN.values() and module not in modules:
        allowed = ", ".join(sorted(modules)) or "none"
        raise InvalidRequest(
            f"tokenize functions of the module {module!r} are not allowed on this service (allowed: {allowed})",
            f"have its operator add it to {SETTING}",
        )
    return full


def takes_tokenizer(name: str) -> bool:
    """Import the checked function ``name``; return whether it asks for the tokenizer. Raises ``InvalidRequest``."""
    return "tokenizer" in signature(_load(name)).parameters


def make(name: str, options: Mapping[str, Any], tokenizer: Callable[[], Any]) -> TokenizeFn:
    """Import the checked function ``name`` and make it; raise ``InvalidRequest`` for one that cannot be used.

    ``tokenizer`` makes the one that the function is given where it asks for one.
    """
    kind = _load(name)
    arguments: dict[str, Any] = dict(options)
    if "tokenizer" in arguments:
        raise InvalidRequest("tokenize_options name a tokenizer", "leave it out: the job's is given")
    try:
        if takes_tokenizer(name):
            arguments["tokenizer"] = tokenizer()
        function = kind(**arguments)
        function.state = "cache"
    except PackhouseError:
        raise
    except Exception as error:  # the class is a user's
        raise InvalidRequest(f"{name} cannot be made ({said(error)})", "correct it, or tokenize_options") from error
    return function


def describe(name: str, options: Mapping[str, Any], function: TokenizeFn) -> Custom:
    """Return how a recipe knows a function; raise ``InvalidRequest`` where its hash or extra columns cannot be used."""
    extra = getattr(function, "extra", {})
    if not isinstance(extra, Mapping):
        raise InvalidRequest(f"the extra columns of {name} are {extra!r}", "give a mapping from names to types")
    columns = tuple(sorted((str(column), str(kind)) for column, kind in extra.items()))
    struct_type(columns)
    return Custom(name, options_json(options), hash_of(name, function), columns, isinstance(function, NamesFiles))


def options_json(options: Mapping[str, Any]) -> str:
    """Return options as canonical JSON; raise ``InvalidRequest`` for what is none."""
    try:
        return canonical_json(options).decode()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"tokenize_options are no JSON ({error})", "give only what JSON can hold") from None


def hash_of(name: str, function: TokenizeFn) -> str:
    """Return a function's hash; raise ``InvalidRequest`` unless it is a text and twice the same."""
    try:
        first, second = function.hash(), function.hash()
    except Exception as error:  # the class is a user's
        raise InvalidRequest(f"hash() of {name} raised {said(error)}", "correct it") from error
    if not isinstance(first, str) or not first:
        raise InvalidRequest(f"hash() of {name} gives {first!r}", "return a text that is not empty")
    if first != second:
        raise InvalidRequest(
            f"hash() of {name} gives {first!r:.60} and then {second!r:.60}", "make it the same whenever it is called"
        )
    return first


def said(error: BaseException) -> str:
    """Return an exception's type and the first line of its text."""
    try:
        lines = str(error).splitlines()
    except Exception:  # its class is a user's too
        lines = []
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _load(name: str) -> type[TokenizeFn]:
    module, _, attribute = name.partition(":")
    try:
        kind = getattr(import_module(module), attribute, None)
    except Exception as error:  # the module is a user's
        raise InvalidRequest(f"the module {module!r} cannot be imported ({said(error)})", "correct it") from error
    # A class that the module only imports is not the operator's choice.
    if not isinstance(kind, type) or kind.__module__ != module:
        raise InvalidRequest(f"the module {module!r} defines no class {attribute!r}", "define it there")
    # Of a class itself, __call__ would be found in any case: it makes an object.
    has = {part for base in kind.__mro__ for part in base.__dict__}
    if missing := [part for part in ("__call__", "hash", "state") if part not in has]:
        raise InvalidRequest(
            f"{name} is no tokenize function: its class has no {' and no '.join(missing)}",
            'define __call__(self, record), hash(self) and state = "cache"; see packhouse.worker.TokenizeFn',
        )
    return kind
