"""Grouping: small pieces of work go to a worker together, large ones alone."""

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def grouped(items: Iterable[T], size: Callable[[T], int], *, most_bytes: int, most_items: int) -> list[list[T]]:
    """Return ``items`` in order, in groups of up to ``most_bytes`` and ``most_items``; a larger item stands alone."""
    groups: list[list[T]] = []
    held = 0
    for item in items:
        if not groups or held + size(item) > most_bytes or len(groups[-1]) >= most_items:
            groups.append([])
            held = 0
        groups[-1].append(item)
        held += size(item)
    return groups
