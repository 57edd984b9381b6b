"""Traces: spans of requests, jobs and their phases go to an OpenTelemetry collector, where one is named."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from fastapi.telemetry import TelemetryConfig
from opentelemetry.trace import NoOpTracerProvider, Tracer, TracerProvider

from packhouse.client.errors import InvalidRequest

NO_TRACES: TracerProvider = NoOpTracerProvider()
"""What takes the spans of a service that has no collector."""

SEND_SECONDS = 2
"""How long spans may take to be sent: the service must also stop in time when its collector is gone."""


@contextmanager
def exported(wanted: bool) -> Iterator[TracerProvider]:
    """Provide what takes spans; if ``wanted``, send them where OpenTelemetry's own variables say.

    Raises ``InvalidRequest`` if they are wanted and the SDK is not installed.
    """
    if not wanted:
        yield NO_TRACES
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk import trace
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InvalidRequest(
            f"OTEL_EXPORTER_OTLP_ENDPOINT is set and {error.name} is not installed",
            "pip install 'packhouse[otel]', or unset it",
        ) from None
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES go before the name given here.
    resource = Resource.create({SERVICE_NAME: "packhouse"}).merge(OTELResourceDetector().detect())
    provider = trace.TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=SEND_SECONDS)))
    try:
        yield provider
    finally:
        provider.shutdown()  # sends what is left


class Phases(AbstractContextManager["Phases"]):
    """Spans that follow each other: entering one ends the one before."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._stack = ExitStack()
        self._name = ""

    def enter(self, name: str) -> None:
        """Begin the span ``name``, unless it is the one that goes on."""
        if name != self._name:
            self._stack.close()
            self._name = name
            self._stack.enter_context(self._tracer.start_as_current_span(name))

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def traced_requests(traces: TracerProvider) -> TelemetryConfig:
    """Return how FastAPI traces requests: a span each, and none for what only asks after the service itself."""
    return {
        "tracer_provider": traces,
        "tracing": traces is not NO_TRACES,
        "metrics": False,
        "logs": False,
        "operation_spans": False,
        "auto_configure": False,
        "exclude": lambda scope: scope.get("path") in ("/livez", "/readyz", "/metrics"),
    }
