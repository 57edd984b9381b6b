"""Blocks whose tokens depend on files besides: the files' content becomes part of what identifies such a block.

What a block names is remembered by the block's digest and the function, a file's digest by what tells that the file has
not changed, as it is with sources. So a warm job reads no file: it takes a stat for each distinct one, and holds their
paths and digests in memory, some 500 bytes for each name in a block.
"""

import json
from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter

from packhouse.client.digest import digest_json
from packhouse.client.store import Store
from packhouse.worker.crew import Crew
from packhouse.worker.files import AttachedBlock, Digested, Places, digest_files, file_at
from packhouse.worker.grouping import grouped
from packhouse.worker.lookup import Index
from packhouse.worker.recipe import Recipe
from packhouse.worker.sources import Block, Fingerprint, SourceChanged
from packhouse.worker.tokenize_fn import Custom
from packhouse.worker.work import names_in_blocks

TASK_BYTES = 64 << 20
"""Blocks, or files, that go to a worker together."""
TASK_ITEMS = 1024


def attach(
    blocks: Sequence[Block], recipe: Recipe, roots: dict[str, str], store: Store, index: Index, crew: Crew
) -> list[Block]:
    """Return the blocks with the files that their records name, as blocks that these files help to identify.

    Blocks of recipes that depend on no file are returned as they are. Looks at each distinct file once.
    """
    custom = recipe.tokenize
    if custom is None or not custom.files:
        return list(blocks)
    names = _names(blocks, recipe, custom, store, index, crew)
    places = {source: Places(source, roots) for source in {block.source for block in blocks}}
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for block in blocks:
        for name in names[block.digest]:
            if (block.source, name) not in found:
                found[block.source, name] = places[block.source].find(name)
    digested = _digests({path for path, _ in found.values() if path}, index, crew)
    return [
        AttachedBlock.of(block, [file_at(name, *found[block.source, name], digested) for name in names[block.digest]])
        for block in blocks
    ]


def file_misses(missing: Iterable[Block], reasons: dict[str, str], index: Index) -> None:
    """Say ``files`` of those misses whose bytes were encoded before, under other content of the files they name."""
    asked = {f"files:{block.content}": block for block in missing if reasons[block.digest] == "new_block"}
    for key in index.get([key for key, block in asked.items() if block.content != block.digest]):
        reasons[asked[key].digest] = "files"


def note_files(done: Iterable[Block], index: Index) -> None:
    """Remember that the bytes of blocks with files have been encoded."""
    items = {f"files:{block.content}": b"1" for block in done if block.content != block.digest}
    if items:
        index.put(items)


def _names(
    blocks: Sequence[Block], recipe: Recipe, custom: Custom, store: Store, index: Index, crew: Crew
) -> dict[str, list[str]]:
    """Return the names in each block, by its digest."""
    function = digest_json(custom.to_json())
    keys = {f"names:{function}:{block.digest}": block for block in blocks}
    known = index.get(list(keys))
    names: dict[str, list[str]] = {keys[key].digest: json.loads(value) for key, value in known.items()}
    unknown = [block for key, block in keys.items() if key not in known]
    groups = grouped(unknown, attrgetter("length"), most_bytes=TASK_BYTES, most_items=TASK_ITEMS)
    for result in crew.results(
        deque(groups), lambda group: crew.executor.submit(names_in_blocks, store, recipe, group)
    ):
        names |= dict(result)
        index.put({f"names:{function}:{digest}": json.dumps(found).encode() for digest, found in result})
    return names


def _digests(paths: Iterable[str], index: Index, crew: Crew) -> dict[str, Digested]:
    """Return the digests of the files that are there, by path."""
    stamps: list[Fingerprint] = []
    for path in sorted(paths):
        try:
            stamps.append(Fingerprint.of(path))
        except SourceChanged:  # it has gone just now
            continue
    keys = {_key(stamp): stamp for stamp in stamps}
    known = index.get(list(keys))
    digests = {keys[key].path: Digested(keys[key], value.decode(), True) for key, value in known.items()}
    unknown = [stamp for key, stamp in keys.items() if key not in known]
    groups = grouped(unknown, attrgetter("size"), most_bytes=TASK_BYTES, most_items=TASK_ITEMS)
    for result in crew.results(
        deque(groups), lambda group: crew.executor.submit(digest_files, [stamp.path for stamp in group])
    ):
        done: list[Digested] = [one for one in result if one is not None]
        digests |= {one.fingerprint.path: one for one in done}
        index.put({_key(one.fingerprint): one.digest.encode() for one in done if one.settled})
    return digests


def _key(stamp: Fingerprint) -> str:
    return f"digest:{stamp.key}"
