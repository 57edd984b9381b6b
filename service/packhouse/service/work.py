"""What a job does: the one place where the service calls the worker."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from packhouse.client.errors import InvalidRequest
from packhouse.client.store import Store
from packhouse.client.wire import JobSpec, Preview, PreviewSpec, Progress
from packhouse.service.catalog import Catalog, RejectedBlock

if TYPE_CHECKING:
    from packhouse.worker.executor import Executor
    from packhouse.worker.recipe import ResolvedRecipe

# The worker's modules import transformers and ray, which take seconds: the service answers before they are in, so
# they are imported where they are used.


KeepRejected = Callable[[list[RejectedBlock]], None]
"""Told, once, where the records lie that a job kept out, whether it succeeds or fails by them."""


class Work(Protocol):
    """What the job table needs of the worker."""

    def check(self, spec: JobSpec) -> "ResolvedRecipe":
        """Raise what is wrong with ``spec``; return its recipe."""

    def run(
        self,
        spec: JobSpec,
        recipe: "ResolvedRecipe",
        on_progress: Callable[[Progress], None],
        keep_rejected: KeepRejected,
        cancelled: threading.Event,
    ) -> str:
        """Do the job and return its dataset; raise why it failed, or anything at all once ``cancelled`` is set."""


@dataclass(frozen=True, slots=True)
class CacheWork:
    """Caching jobs, done by the worker on Ray."""

    store: Store
    catalog: Catalog
    executor: "Executor"

    def check(self, spec: JobSpec) -> "ResolvedRecipe":
        """Look for the sources first: that is quick, and a wrong path is the most common fault."""
        from packhouse.worker import recipe, sources
        from packhouse.worker.unpacked import first_records

        _check_paths([*spec.sources, spec.tokenizer])
        files = sources.expand(spec.sources)
        first = first_records(files, spec.documents) if spec.format is None else []
        resolved = recipe.resolve(spec, self.store, first)
        empty = tuple(f"the source {file!r} is empty" for file in files if os.path.getsize(file) == 0)
        return replace(resolved, warnings=(*resolved.warnings, *empty[:10]))

    def run(
        self,
        spec: JobSpec,
        recipe: "ResolvedRecipe",
        on_progress: Callable[[Progress], None],
        keep_rejected: KeepRejected,
        cancelled: threading.Event,
    ) -> str:
        """Run the worker's pipeline."""
        from packhouse.worker import pipeline

        try:
            outcome = pipeline.run(
                spec,
                recipe,
                store=self.store,
                index=self.catalog,
                executor=self.executor,
                on_progress=on_progress,
                cancelled=cancelled,
            )
        except pipeline.BadRecords as error:
            keep_rejected(list(_with_rejected(error.blocks)))
            raise
        keep_rejected(list(_with_rejected(outcome.blocks)))
        return outcome.dataset_id


def preview(spec: PreviewSpec, store: Store) -> Preview:
    """Return what the first records of a job would become; raise what is wrong with it."""
    from packhouse.worker import preview as worker

    _check_paths([*spec.job.sources, spec.job.tokenizer])
    return worker.preview(spec, store)


def warm_up() -> None:
    """Import what the first job needs."""
    from packhouse.worker import libraries, pipeline, plans, recipe, sources  # noqa: F401

    libraries.auto_tokenizer()


def _check_paths(paths: list[str]) -> None:
    for path in paths:
        if "\0" in path:
            raise InvalidRequest(f"the path {path!r} holds a zero byte", "no file can have that name")


def _with_rejected(blocks: Sequence[dict[str, Any]]) -> Iterator[RejectedBlock]:
    for block in blocks:
        if block["rejected"]:
            yield RejectedBlock(
                block["source"], block["offset"], block["first_line"], block["shard"], block["rejected"]
            )
