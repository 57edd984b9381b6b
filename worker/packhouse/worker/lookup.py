"""The lookup: what is remembered of sources and blocks, which blocks are hits, and why the others are misses."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, Protocol

from packhouse.client.digest import digest_json
from packhouse.client.format import data_path
from packhouse.client.receipt_file import ReceiptFile
from packhouse.client.store import LocalStore, Store
from packhouse.client.wire import Change, Miss
from packhouse.worker.provenance import suspect
from packhouse.worker.recipe import Recipe
from packhouse.worker.shards import find_stored
from packhouse.worker.sources import Block, Fingerprint
from packhouse.worker.work import Scanned

RECIPES_SEEN = 8
"""Recipes that are remembered of a block, the latest ones."""
REQUESTS = 32
"""Shards that are looked for at once in a store that is asked over a network."""


class Index(Protocol):
    """Small values under keys, kept beside the store. Losing them costs a scan of the sources, and nothing else."""

    def get(self, keys: list[str]) -> dict[str, bytes]:
        """Return the values of those ``keys`` that are there."""

    def put(self, items: dict[str, bytes]) -> None:
        """Set values."""


class Needs(Protocol):
    """Whoever bounds the store's space, and must not evict what a job is about to use."""

    def need(self, keys: Collection[str]) -> None:
        """Keep these shards while the job runs; return once none of them is being evicted."""

    def made(self, shards: Mapping[str, int], recipe: str) -> None:
        """Hear of new shards: key → bytes of their files, and the digest of their recipe."""


class NoEviction:
    """The needs of jobs on a store from which nothing is evicted."""

    def need(self, keys: Collection[str]) -> None:
        """Keep what is kept anyway."""

    def made(self, shards: Mapping[str, int], recipe: str) -> None:
        """Hear of new shards."""


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


@dataclass(frozen=True, slots=True)
class Why:
    """Why a block is a miss."""

    reason: str
    """``new_block``; ``evicted``, ``damaged`` or ``audit`` for one seen under this very recipe; else a recipe field."""
    recipe: str = ""
    """Digest of the recipe that it is compared with; empty for a new block."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What was found for some blocks, by their digests."""

    hits: dict[str, ReceiptFile]
    misses: dict[str, Why]
    changes: dict[Why, tuple[Change, ...]]
    """The fields that differ, of each reason there is; the first one gives it its name."""


class Misses:
    """Misses, counted by their reason."""

    def __init__(self) -> None:
        self._blocks: Counter[Why] = Counter()
        self._bytes: Counter[Why] = Counter()

    def add(self, why: Why, times: int, length: int) -> None:
        """Count a block of ``length`` bytes that occurs so many times."""
        self._blocks[why] += times
        self._bytes[why] += times * length

    def told(self, changes: Mapping[Why, Sequence[Change]], most: int) -> list[Miss]:
        """Return the misses of each reason with what changed: of ``most`` reasons, those of most blocks."""
        return [
            Miss(
                reason=why.reason,
                blocks=blocks,
                bytes=self._bytes[why],
                recipe=why.recipe or None,
                changes=list(changes.get(why, ())),
            )
            for why, blocks in self._blocks.most_common(most)
        ]


def look_up(keys: Mapping[str, str], recipe: Recipe, store: Store, index: Index, failed: Collection[str]) -> Lookup:
    """Look for the shards of blocks: ``keys`` are their shard keys, by block digest.

    A shard in which one of the ``failed`` parts had a hand is a miss, and so is one of which that is not known.
    """
    hits: dict[str, ReceiptFile] = {}
    reasons: dict[str, str] = {}
    for digest, (stored, why) in zip(keys, _find(store, list(keys.values())), strict=True):
        if stored is not None and not suspect(stored.made_by, failed):
            hits[digest] = stored
        else:
            reasons[digest] = "audit" if stored is not None else why
    misses, changes = _reasons(reasons, recipe, index)
    return Lookup(hits, misses | _lost(misses, keys, store), changes)


def _lost(misses: Mapping[str, Why], keys: Mapping[str, str], store: Store) -> dict[str, Why]:
    """Return those misses that lost their receipt alone: eviction leaves nothing of a shard, so they are damaged."""
    gone = [digest for digest, why in misses.items() if why.reason == "evicted"]
    sizes = store.sizes([data_path(keys[digest]) for digest in gone])
    return {
        digest: replace(misses[digest], reason="damaged")
        for digest, size in zip(gone, sizes, strict=True)
        if size is not None
    }


def _find(store: Store, keys: Sequence[str]) -> list[tuple[ReceiptFile | None, str]]:
    find = partial(find_stored, store)
    if isinstance(store, LocalStore):
        return [find(key) for key in keys]
    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(find, keys))


def _reasons(
    found: Mapping[str, str], recipe: Recipe, index: Index
) -> tuple[dict[str, Why], dict[Why, tuple[Change, ...]]]:
    """Return why each block is a miss of which the store said only that its shard is absent, damaged or suspect."""
    seen = index.get([f"seen:{digest}" for digest in found])
    others = sorted({other for value in seen.values() for other in _digests(value)})
    recipes = {key: json.loads(value) for key, value in index.get([f"recipe:{other}" for other in others]).items()}
    ours = Why("evicted", recipe.digest)
    known = {value: _closest(_digests(value), recipe, recipes) for value in set(seen.values())}
    misses: dict[str, Why] = {}
    changes: dict[Why, tuple[Change, ...]] = {}
    for digest, why in found.items():
        if why != "absent":
            misses[digest] = Why(why, ours.recipe)
        else:
            misses[digest], changed = known.get(seen.get(f"seen:{digest}", b""), (Why("new_block"), ()))
            changes[misses[digest]] = changed
    return misses, changes


def _digests(value: bytes) -> list[str]:
    text = value.decode()
    return [text[start : start + 32] for start in range(0, len(text), 32)]


def _closest(digests: Sequence[str], recipe: Recipe, recipes: Mapping[str, Any]) -> tuple[Why, tuple[Change, ...]]:
    """Compare with the recipe of ``digests`` that differs in fewest fields, the latest of those."""
    if recipe.digest in digests:
        return Why("evicted", recipe.digest), ()
    known = [(digest, recipes[f"recipe:{digest}"]) for digest in digests if f"recipe:{digest}" in recipes]
    compared = [(digest, changes_between(other, recipe.to_json())) for digest, other in known]
    if not compared:
        return Why("new_block"), ()
    digest, changes = min(compared, key=lambda pair: len(pair[1]))
    return Why(changes[0].field, digest), changes


_ORDER = ("format", "kind", "tokenizer", "template", "loss", "max_length")


def changes_between(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Change, ...]:
    """Return the fields in which two recipes differ, those first that say most."""
    names = sorted({*old, *new}, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))
    pairs = ((name, old.get(name), new.get(name)) for name in names)
    return tuple(Change(field=name, old=before, new=after) for name, before, after in pairs if before != after)


def note_recipe(recipe: Recipe, index: Index) -> None:
    """Remember what a recipe's digest stands for."""
    index.put({f"recipe:{recipe.digest}": json.dumps(recipe.to_json()).encode()})


def note_seen(digests: Collection[str], recipe: Recipe, index: Index) -> None:
    """Remember that blocks were encoded under a recipe."""
    keys = [f"seen:{digest}" for digest in digests]
    before = index.get(keys)
    latest = recipe.digest
    items = {}
    for key in keys:
        others = [other for other in _digests(before.get(key, b"")) if other != latest]
        items[key] = "".join([latest, *others][:RECIPES_SEEN]).encode()
    index.put(items)


def failed_parts(recipe: Recipe, index: Index) -> frozenset[str]:
    """Return which of 'engine' and 'renderer' an audit ever found wrong for this tokenizer, or for this template."""
    keys = _slow_keys(recipe)
    found = index.get(list(keys.values()))
    return frozenset(part for part, key in keys.items() if key in found)


def note_audit_failed(recipe: Recipe, parts: Iterable[str], index: Index) -> None:
    """Remember that the 'engine' for this tokenizer, or the 'renderer' for this template, cannot be trusted."""
    keys = _slow_keys(recipe)
    index.put({keys[part]: b"1" for part in parts})


def _slow_keys(recipe: Recipe) -> dict[str, str]:
    return {"engine": f"slow:{recipe.tokenizer}", "renderer": f"slow:{digest_json(recipe.template)}"}
