"""The lookup: what is remembered of sources and blocks, and why a block is a miss."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from typing import Any, Protocol

from packhouse.client.digest import digest_json
from packhouse.worker.recipe import Recipe
from packhouse.worker.sources import Block, Fingerprint
from packhouse.worker.work import Scanned


class Index(Protocol):
    """Small values under keys, kept beside the store. Losing them costs a scan of the sources, and nothing else."""

    def get(self, keys: list[str]) -> dict[str, bytes]:
        """Return the values of those ``keys`` that are there."""

    def put(self, items: dict[str, bytes]) -> None:
        """Set values."""


def remembered_blocks(fingerprints: Sequence[Fingerprint], index: Index) -> dict[str, tuple[Block, ...]]:
    """Return the blocks of those sources that have not changed since they were scanned, by path."""
    found = index.get([fingerprint.key for fingerprint in fingerprints])
    return {
        fingerprint.path: tuple(Block(fingerprint.path, *row) for row in json.loads(found[fingerprint.key]))
        for fingerprint in fingerprints
        if fingerprint.key in found
    }


def remember_blocks(scanned: Iterable[Scanned], index: Index) -> None:
    """Keep the blocks of sources whose times would betray a later write."""
    items = {}
    for source in scanned:
        if source.settled:
            rows = [astuple(block)[1:] for block in source.blocks]
            items[source.fingerprint.key] = json.dumps(rows).encode()
    index.put(items)


def miss_reasons(digests: Sequence[str], recipe: Recipe, index: Index) -> dict[str, str]:
    """Return, for blocks without a shard, the first part of the key that changed since each was last encoded.

    That is ``new_block`` for one never seen, ``evicted`` for one seen under this very recipe, else the name of a
    recipe field.
    """
    seen = index.get([f"seen:{digest}" for digest in digests])
    others = sorted({value.decode() for value in seen.values()})
    recipes = index.get([f"recipe:{digest}" for digest in others])
    changed = {digest: _changed(recipe, recipes.get(f"recipe:{digest}")) for digest in others}
    reasons = {}
    for digest in digests:
        value = seen.get(f"seen:{digest}")
        reasons[digest] = "new_block" if value is None else changed[value.decode()]
    return reasons


def _changed(recipe: Recipe, other: bytes | None) -> str:
    if other is None:
        return "new_block"
    fields: dict[str, Any] = json.loads(other)
    names = [name for name, value in recipe.to_json().items() if fields.get(name) != value]
    order = ["format", "kind", "tokenizer", "template", "loss", "max_length"]
    return min(names, key=lambda name: (order.index(name) if name in order else len(order), name), default="evicted")


def note_seen(digests: Iterable[str], recipe: Recipe, index: Index) -> None:
    """Remember under which recipe blocks were encoded last."""
    value = recipe.digest.encode()
    index.put({f"recipe:{recipe.digest}": json.dumps(recipe.to_json()).encode()})
    index.put({f"seen:{digest}": value for digest in digests})


def audit_failed(recipe: Recipe, index: Index) -> bool:
    """Return whether an audit ever found the fast engine wrong for this tokenizer, or the renderer for the template."""
    return bool(index.get(list(_slow_keys(recipe).values())))


def note_audit_failed(recipe: Recipe, parts: Iterable[str], index: Index) -> None:
    """Remember that the 'engine' for this tokenizer, or the 'renderer' for this template, cannot be trusted."""
    keys = _slow_keys(recipe)
    index.put({keys[part]: b"1" for part in parts})


def _slow_keys(recipe: Recipe) -> dict[str, str]:
    return {"engine": f"slow:{recipe.tokenizer}", "renderer": f"slow:{digest_json(recipe.template)}"}
