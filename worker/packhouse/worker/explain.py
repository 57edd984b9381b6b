"""Explaining: what of a job is in the cache and why the rest is not, before it runs. Nothing is made or changed."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from packhouse.client.store import Store
from packhouse.client.wire import Change, JobSpec
from packhouse.client.wire_explain import ExplainedSource, Explanation
from packhouse.worker.attached import attach
from packhouse.worker.crew import Crew
from packhouse.worker.encoding import look_up_blocks
from packhouse.worker.executor import Executor
from packhouse.worker.lookup import Index, Lookup, Misses, Why, failed_parts, remembered_blocks
from packhouse.worker.recipe import Recipe, ResolvedRecipe
from packhouse.worker.scanning import find_blocks
from packhouse.worker.sources import Block, Fingerprint, fingerprints, listed
from packhouse.worker.tally import Report, Tally

AT_ONCE = 2_000
"""Blocks that are looked up between two steps: a fraction of a second."""
MISSES_TOLD = 100
"""Kinds of misses that are told, those of most blocks."""


def explain(
    spec: JobSpec,
    resolved: ResolvedRecipe,
    *,
    store: Store,
    index: Index,
    executor: Executor | None = None,
    limit: int = 100,
) -> Iterator[Explanation]:
    """Explain a job: yield how far it is, the last time when it is done.

    Sources that are new or have changed are scanned by ``executor``, before the first step; without one they are named.
    Records that name files are known by those too: without an executor, sources of such jobs count as not scanned.
    Raises ``InvalidRequest`` and ``SourceChanged`` for sources that cannot be read.
    """
    begun, recipe = time.monotonic(), resolved.recipe_
    seen = fingerprints(listed(spec.sources), spec.documents)
    blocks = _blocks(spec, recipe, seen, store, index, executor)
    known = [block for found in blocks.values() for block in found]
    unscanned = [stamp for path, stamp in seen.items() if path not in blocks]
    told = Explanation(
        recipe=recipe.digest,
        sources=len(seen),
        unscanned=len(unscanned),
        unscanned_bytes=sum(stamp.size for stamp in unscanned),
        blocks=len(known),
        hits=0,
        bytes=sum(block.length for block in known),
        hit_bytes=0,
        misses=[],
        listed=[],
        seconds=0.0,
        done=False,
    )
    yield told
    found, failed = _Found(), failed_parts(recipe, index)
    for start in range(0, len(known), AT_ONCE):
        some = known[start : start + AT_ONCE]
        found.add(look_up_blocks({block.digest: block for block in some}, recipe, store, index, failed))
        hits = [block.length for block in some if block.digest in found.hits]
        counted = {"hits": told.hits + len(hits), "hit_bytes": told.hit_bytes + sum(hits)}
        counted |= {"looked_up": told.looked_up + len(some)}
        yield (told := told.model_copy(update={**counted, "seconds": round(time.monotonic() - begun, 3)}))
    rest = (_explained(path, blocks.get(path), found) for path in seen)
    sources = [one for one in rest if not one.scanned or one.hits < one.blocks]
    last = {"misses": _explained("", known, found).misses, "listed": sources[:limit], "done": True}
    yield told.model_copy(update={**last, "seconds": round(time.monotonic() - begun, 3)})


def _blocks(
    spec: JobSpec,
    recipe: Recipe,
    seen: Mapping[str, Fingerprint],
    store: Store,
    index: Index,
    executor: Executor | None,
) -> dict[str, list[Block]]:
    """Return the blocks of each source whose blocks are known, or can be."""
    if executor is None:
        if recipe.tokenize is not None and recipe.tokenize.files:
            return {}
        return {path: list(found) for path, found in remembered_blocks(list(seen.values()), index).items()}
    crew = Crew(executor, store, threading.Event())
    try:
        found = find_blocks(list(seen), spec.documents, index, crew, Report(Tally(), lambda progress: None))
        attached = attach(found, recipe, spec.file_roots, store, index, crew)
    finally:
        crew.disband()
    blocks: dict[str, list[Block]] = {path: [] for path in seen}
    for block in attached:
        blocks[block.source].append(block)
    return blocks


@dataclass(slots=True)
class _Found:
    """What was found so far: of hits that they are, since the receipts of a million are gigabytes."""

    hits: set[str] = field(default_factory=set)
    misses: dict[str, Why] = field(default_factory=dict)
    changes: dict[Why, tuple[Change, ...]] = field(default_factory=dict)

    def add(self, more: Lookup) -> None:
        self.hits.update(more.hits)
        self.misses |= more.misses
        self.changes |= more.changes


def _explained(path: str, blocks: Sequence[Block] | None, found: _Found) -> ExplainedSource:
    if blocks is None:
        return ExplainedSource(source=path, scanned=False, blocks=0, hits=0, misses=[])
    misses = Misses()
    for block in blocks:
        if block.digest in found.misses:
            misses.add(found.misses[block.digest], 1, block.length)
    hits = sum(block.digest in found.hits for block in blocks)
    told = misses.told(found.changes, MISSES_TOLD)
    return ExplainedSource(source=path, scanned=True, blocks=len(blocks), hits=hits, misses=told)
