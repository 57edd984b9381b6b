"""Provenance: by what a shard was made. It stands in the shard's receipt file, never in its key or in a manifest.

Which engine makes the tokens must not matter, and is proven whenever an engine is loaded and audited while it runs: an
upgrade of an engine is proven anew and changes no key. When an audit finds one wrong all the same, what it has made
before is found by this, and made again.
"""

from collections.abc import Collection, Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

from packhouse.worker.tokenize import Toolkit

_FAST = {"engine": "gigatoken", "renderer": "minijinja"}
_PACKAGES = {"gigatoken": "gigatoken", "huggingface": "tokenizers", "minijinja": "minijinja", "jinja2": "jinja2"}


def made_by(engine: str, toolkit: Toolkit) -> dict[str, str]:
    """Return what a block's shard is made by: packhouse's version, and engine and renderer with theirs."""
    parts = {"packhouse": _version("packhouse"), "engine": _named(engine)}
    if toolkit.template is not None:
        parts["renderer"] = _named("jinja2" if toolkit.template.fast is None else "minijinja")
    return parts


def suspect(made_by: Mapping[str, Any], failed: Collection[str]) -> bool:
    """Whether one of the ``failed`` parts, 'engine' and 'renderer', had a hand in a shard; yes if that is not known."""
    return bool(failed) and (not made_by or any(_FAST[part] in str(made_by.get(part, "")) for part in failed))


def _named(part: str) -> str:
    package = _PACKAGES.get(part)
    return part if package is None else f"{package} {_version(package)}"


@cache
def _version(package: str) -> str:
    return version(package)
