"""Roots: the folders and prefixes of buckets that a service lets requests read from.

Links and ``..`` are followed before a path is compared, so what is outside stays out by whatever name it is called. It
is asked where files are listed and again where they are opened, by the service and by every worker.
"""

import os
import re
from collections.abc import Iterable
from functools import lru_cache

from packhouse.client.errors import InvalidRequest
from packhouse.worker.settings import source_roots

S3 = "s3://"
_MAGIC = re.compile(r"[*?\[]")


class OutsideRoots(InvalidRequest):
    """A path that leads out of the allowed folders; whether something is there is not told."""


def parse(text: str) -> tuple[str, ...]:
    """Return the roots of a list with commas between them; raise ``InvalidRequest`` for what cannot be one."""
    roots = []
    for one in filter(None, (part.strip() for part in text.split(","))):
        if one.startswith(S3):
            if not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?", one):
                raise InvalidRequest(f"the source root {one!r} names no bucket", "write s3://bucket/prefix/")
        elif not os.path.isabs(one):
            raise InvalidRequest(f"the source root {one!r} is a relative path", "give an absolute one")
        roots.append(one)
    return tuple(roots)


def allowed(path: str) -> bool:
    """Return whether a file, folder or object lies under a root; always where there are none."""
    given = source_roots()
    if given is None:
        return True
    folders, prefixes = _known(given)
    if path.startswith(S3):
        return any(path == prefix or path.startswith(prefix + "/") for prefix in prefixes)
    real = os.path.realpath(path)
    return any(real == folder or real.startswith(folder.rstrip("/") + "/") for folder in folders)


def check(path: str) -> None:
    """Raise ``OutsideRoots`` for a path that is not allowed."""
    if not allowed(path):
        roots = parse(source_roots() or "")
        raise OutsideRoots(
            f"{path!r} lies outside of what this service may read ({', '.join(roots) or 'nothing'})",
            "name something under those; PACKHOUSE_SOURCE_ROOTS of the service sets them",
        )


def check_all(paths: Iterable[str]) -> None:
    """Raise ``OutsideRoots`` for the first of ``paths`` that is not allowed."""
    if source_roots() is not None:
        for path in paths:
            check(path)


def check_pattern(pattern: str) -> None:
    """Raise ``OutsideRoots`` for a glob whose fixed beginning is not allowed, or that goes up on its way."""
    if source_roots() is None:
        return
    parts = pattern.split("/")
    fixed = next((at for at, part in enumerate(parts) if _MAGIC.search(part)), len(parts))
    check("/".join(parts[:fixed]) or "/")
    if ".." in parts[fixed:]:
        fact = f"the glob {pattern!r} goes up behind a part that is matched"
        raise OutsideRoots(fact, "write it without '..'")


@lru_cache(maxsize=8)
def _known(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the real folders, and the prefixes without their last slash."""
    roots = parse(text)
    folders = tuple(os.path.realpath(root) for root in roots if not root.startswith(S3))
    return folders, tuple(root.rstrip("/") for root in roots if root.startswith(S3))
