"""What a job does: the one place where the service calls the worker."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from packhouse.client.errors import InvalidRequest
from packhouse.client.store import Store
from packhouse.client.wire import JobSpec, Preview, PreviewSpec, Progress
from packhouse.client.wire_explain import ExplainSpec, Explanation
from packhouse.service.catalog import Catalog, RejectedBlock
from packhouse.service.inventory import Inventory
from packhouse.worker.flights import Flights

if TYPE_CHECKING:
    from packhouse.worker.executor import Executor
    from packhouse.worker.recipe import ResolvedRecipe
    from packhouse.worker.work import Done

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
        submitter: str,
    ) -> str:
        """Do the job and return its dataset; raise why it failed, or anything at all once ``cancelled`` is set."""


@dataclass(frozen=True, slots=True)
class CacheWork:
    """Caching jobs, done by the worker on Ray."""

    store: Store
    catalog: Catalog
    executor: "Executor"
    on_encoded: "Callable[[Done], None]" = lambda done: None
    """Told of each block that a worker has encoded."""
    modules: tuple[str, ...] = ()
    """Those that tokenize functions may be imported from."""
    inventory: Inventory | None = field(default=None, kw_only=True)
    """Told what a job needs and makes; None where nothing is ever evicted."""
    _flights: Flights = field(default_factory=Flights, init=False)

    def check(self, spec: JobSpec) -> "ResolvedRecipe":
        """Look for the sources first: that is quick, and a wrong path is the most common fault."""
        from packhouse.worker import places, recipe, scanning, sources
        from packhouse.worker.files import check_roots
        from packhouse.worker.unpacked import first_records

        _check_paths([*spec.sources, spec.tokenizer, *spec.file_roots.values()])
        files = sources.listed(spec.sources)
        sources.check_readable(scanning.unremembered(files, spec.documents, self.catalog))
        check_roots(spec.file_roots)
        first = first_records(files, spec.documents) if spec.format is None and spec.tokenize is None else []
        resolved = recipe.resolve(spec, self.store, first, self.modules)
        sizes = zip(files, places.sizes_of(files), strict=True)
        empty = tuple(f"the source {file!r} is empty" for file, size in sizes if size == 0)
        return replace(resolved, warnings=(*resolved.warnings, *empty[:10]))

    def run(
        self,
        spec: JobSpec,
        recipe: "ResolvedRecipe",
        on_progress: Callable[[Progress], None],
        keep_rejected: KeepRejected,
        cancelled: threading.Event,
        submitter: str,
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
                on_encoded=self.on_encoded,
                needs=self.inventory,
                flights=self._flights,
                submitter=submitter,
            )
        except pipeline.BadRecords as error:
            keep_rejected(list(_with_rejected(error.blocks)))
            raise
        keep_rejected(list(_with_rejected(outcome.blocks)))
        if self.inventory is not None:
            self.inventory.add_dataset(self.store, outcome.dataset_id)
        return outcome.dataset_id


def explain(
    spec: ExplainSpec, store: Store, catalog: Catalog, executor: "Executor", modules: tuple[str, ...] = ()
) -> Iterator[Explanation]:
    """Yield how far it is with what of a job is in the cache, and why not, at last with ``done``.

    The first step raises what is wrong with the job.
    """
    from packhouse.worker import explain as worker

    recipe = CacheWork(store, catalog, executor, modules=modules).check(spec.job)
    scanning = executor if spec.scan else None
    yield from worker.explain(spec.job, recipe, store=store, index=catalog, executor=scanning, limit=spec.limit)


def preview(spec: PreviewSpec, store: Store, modules: tuple[str, ...] = ()) -> Preview:
    """Return what the first records of a job would become; raise what is wrong with it."""
    from packhouse.worker import preview as worker
    from packhouse.worker.files import check_roots

    _check_paths([*spec.job.sources, spec.job.tokenizer, *spec.job.file_roots.values()])
    check_roots(spec.job.file_roots)
    return worker.preview(spec, store, modules)


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
