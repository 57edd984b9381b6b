"""packhouse.worker: from source to shards on Ray, and from shards to plans."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packhouse.worker.records import BadRecord
    from packhouse.worker.tokenize_fn import File, TokenizeFn

__all__ = ["BadRecord", "File", "TokenizeFn"]

# Imported when asked for: a module of the portion must not import all that these need.
_HOMES = {"BadRecord": "records", "File": "tokenize_fn", "TokenizeFn": "tokenize_fn"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
