"""Explaining: what of a job is in the cache and why the rest is not, before it runs. Nothing is made or changed."""

import threading
import time
from collections.abc import Mapping, Sequence

from packhouse.client.store import Store
from packhouse.client.wire import JobSpec
from packhouse.client.wire_explain import ExplainedSource, Explanation
from packhouse.worker.attached import attach
from packhouse.worker.crew import Crew
from packhouse.worker.encoding import look_up_blocks
from packhouse.worker.executor import Executor
from packhouse.worker.lookup import Index, Lookup, Misses, failed_parts, remembered_blocks
from packhouse.worker.recipe import Recipe, ResolvedRecipe
from packhouse.worker.scanning import find_blocks
from packhouse.worker.sources import Block, Fingerprint, fingerprints, listed
from packhouse.worker.tally import Report, Tally

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
) -> Explanation:
    """Explain a job. Sources that are new or have changed are scanned by ``executor``; without one they are named.

    Records that name files are known by those too: without an executor, sources of such jobs count as not scanned.
    Raises ``InvalidRequest`` and ``SourceChanged`` for sources that cannot be read.
    """
    begun, recipe = time.monotonic(), resolved.recipe_
    seen = fingerprints(listed(spec.sources), spec.documents)
    blocks = _blocks(spec, recipe, seen, store, index, executor)
    known = [block for found in blocks.values() for block in found]
    by_digest = {block.digest: block for block in known}
    found = look_up_blocks(by_digest, recipe, store, index, failed_parts(recipe, index))
    whole = _explained("", known, found)
    unscanned = [stamp for path, stamp in seen.items() if path not in blocks]
    rest = (_explained(path, blocks.get(path), found) for path in seen)
    told = [one for one in rest if not one.scanned or one.hits < one.blocks]
    return Explanation(
        recipe=recipe.digest,
        sources=len(seen),
        unscanned=len(unscanned),
        unscanned_bytes=sum(stamp.size for stamp in unscanned),
        blocks=whole.blocks,
        hits=whole.hits,
        bytes=sum(block.length for block in known),
        hit_bytes=sum(block.length for block in known if block.digest in found.hits),
        misses=whole.misses,
        listed=told[:limit],
        seconds=round(time.monotonic() - begun, 3),
    )


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


def _explained(path: str, blocks: Sequence[Block] | None, found: Lookup) -> ExplainedSource:
    if blocks is None:
        return ExplainedSource(source=path, scanned=False, blocks=0, hits=0, misses=[])
    misses = Misses()
    for block in blocks:
        if block.digest in found.misses:
            misses.add(found.misses[block.digest], 1, block.length)
    hits = sum(block.digest in found.hits for block in blocks)
    told = misses.told(found.changes, MISSES_TOLD)
    return ExplainedSource(source=path, scanned=True, blocks=len(blocks), hits=hits, misses=told)
