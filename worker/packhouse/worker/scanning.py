"""Scanning: the blocks of a job's sources, remembered where a source has not changed, else found by the workers."""

from collections import deque
from collections.abc import Sequence
from operator import attrgetter

from packhouse.worker.crew import Crew
from packhouse.worker.executor import Task
from packhouse.worker.grouping import grouped
from packhouse.worker.lookup import Index, remember_blocks, remembered_blocks
from packhouse.worker.sources import Block, Fingerprint, SourceChanged, check_readable, fingerprints
from packhouse.worker.tally import Report
from packhouse.worker.work import Scanned, scan_sources

SCAN_BYTES, SCAN_FILES = 128 << 20, 256
"""Small files go to a worker together, up to so many bytes and files."""


def unremembered(files: Sequence[str], documents: str, index: Index) -> list[str]:
    """Return those of ``files`` that are new, have changed or are gone."""
    try:
        keys = {file: fingerprint.key for file, fingerprint in fingerprints(files, documents).items()}
    except SourceChanged:
        return list(files)
    known = index.get(list(keys.values()))
    return [file for file, key in keys.items() if key not in known]


def find_blocks(files: Sequence[str], documents: str, index: Index, crew: Crew, report: Report) -> list[Block]:
    """Return the blocks of ``files``, in order; those of sources that are new or have changed are remembered.

    Raises what ``sources.scan`` and ``Crew.results`` do.
    """
    seen = fingerprints(files, documents)
    found = remembered_blocks(list(seen.values()), index)
    unknown = [fingerprint for file, fingerprint in seen.items() if file not in found]
    check_readable([fingerprint.path for fingerprint in unknown])
    queue = deque(grouped(unknown, attrgetter("size"), most_bytes=SCAN_BYTES, most_items=SCAN_FILES))

    def begin(group: list[Fingerprint]) -> Task:
        return crew.executor.submit(scan_sources, [file.path for file in group], documents)

    results: list[Scanned]
    for results in crew.results(queue, begin):
        remember_blocks(results, index)
        found |= {source.fingerprint.path: source.blocks for source in results}
        report.tally.bytes_read += sum(source.fingerprint.size for source in results)
        report.tell("scanning")
    return [block for file in files for block in found[file]]
