"""Work that is watched: what a job does is counted, logged and traced, and is otherwise the same."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentelemetry.trace import Span, StatusCode, Tracer, TracerProvider
from sqlalchemy.exc import DBAPIError

from packhouse.client.errors import PackhouseError, Unavailable
from packhouse.client.wire import JobSpec, Progress
from packhouse.service.logs import bound_to
from packhouse.service.metrics import Doing, Metrics
from packhouse.service.traces import NO_TRACES, Phases
from packhouse.service.work import KeepRejected, Work

if TYPE_CHECKING:
    from packhouse.worker.recipe import ResolvedRecipe

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ObservedWork:
    """The work of another, watched."""

    work: Work
    metrics: Metrics
    traces: TracerProvider = NO_TRACES

    def check(self, spec: JobSpec) -> "ResolvedRecipe":
        """Check as the work does."""
        return self.work.check(spec)

    def run(
        self,
        spec: JobSpec,
        recipe: "ResolvedRecipe",
        on_progress: Callable[[Progress], None],
        keep_rejected: KeepRejected,
        cancelled: threading.Event,
        submitter: str,
    ) -> str:
        """Run the work."""
        tracer = self.traces.get_tracer("packhouse")
        attributes = {"packhouse.job": bound_to("job") or "", "packhouse.recipe": recipe.digest}
        with (
            tracer.start_as_current_span("job", attributes=attributes, set_status_on_exception=False) as span,
            _Watch(self.metrics, tracer, on_progress, cancelled, span) as watch,
        ):
            log.info("it begins: sources %s, recipe %s", ", ".join(map(repr, spec.sources[:3])), recipe.digest)
            dataset = self.work.run(spec, recipe, watch.progressed, keep_rejected, cancelled, submitter)
            span.set_attribute("packhouse.dataset", dataset)
            return dataset


class _Watch:
    """One run of a job, from its first progress to how it ends."""

    def __init__(
        self,
        metrics: Metrics,
        tracer: Tracer,
        on_progress: Callable[[Progress], None],
        cancelled: threading.Event,
        span: Span,
    ) -> None:
        self._metrics, self._cancelled, self._span = metrics, cancelled, span
        self._on_progress = on_progress
        self._doing = Doing(metrics)
        self._phases = Phases(tracer)
        self._progress = Progress()
        self._begun = time.monotonic()

    def progressed(self, progress: Progress) -> None:
        """Count and trace what is new, and pass it on."""
        for reason in progress.fallbacks.keys() - self._progress.fallbacks.keys():
            log.warning("a slower way is taken: %s", reason)
        self._progress = progress
        if progress.phase != "done":
            self._phases.enter(progress.phase)
        self._doing.progressed(progress)
        self._on_progress(progress)

    def __enter__(self) -> "_Watch":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._phases.__exit__()
        seconds, progress = time.monotonic() - self._begun, self._progress
        if error is None:
            self._metrics.succeeded(progress, seconds)
            log.info(
                "it succeeded in %.1f s: %d rows, %d of %d blocks were hits",
                *(seconds, progress.rows, progress.hits, progress.blocks),
            )
        elif self._cancelled.is_set():
            self._metrics.interrupted(seconds)
            log.info("it was interrupted after %.1f s", seconds)
        else:  # the job table logs why
            self._metrics.failed(progress, _kind(error), seconds)
            self._span.set_status(StatusCode.ERROR, str(error))


def _kind(error: BaseException) -> str:
    """Return the kind of the problem that the job's submitter is told."""
    if isinstance(error, DBAPIError):
        return Unavailable.kind
    return error.kind if isinstance(error, PackhouseError) else "internal"
