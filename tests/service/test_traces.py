"""Traces: spans of requests, jobs and phases, and what becomes of them."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from packhouse.client.errors import InvalidRequest
from packhouse.client.wire import JobSpec
from packhouse.service.app import create_app
from packhouse.service.logs import bound
from packhouse.service.metrics import Metrics
from packhouse.service.observed import ObservedWork
from packhouse.service.settings import Settings
from packhouse.service.traces import NO_TRACES, exported
from packhouse.service.work import CacheWork

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="the extra 'otel' is not installed")


@pytest.fixture
def spans() -> Any:
    """A provider and, as ``.found()``, the spans that it was given, by name."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    provider.found = lambda: {span.name: span for span in memory.get_finished_spans()}
    return provider


def job(service: Any, spans: Any, spec: JobSpec) -> str:
    parts = service.parts
    work = ObservedWork(CacheWork(parts.store, parts.catalog, parts.executor), Metrics(), spans)
    with bound(job="j1"):
        return work.run(spec, work.check(spec), lambda progress: None, lambda blocks: None, threading.Event(), "ann")


def test_a_job_and_its_phases_are_spans(service: Any, spans: Any, texts: Path, tokenizer_dir: Path) -> None:
    dataset = job(service, spans, JobSpec(sources=[str(texts)], tokenizer=str(tokenizer_dir), name="traced"))
    found = spans.found()
    assert set(found) == {"job", "scanning", "encoding"}
    assert dict(found["job"].attributes)["packhouse.job"] == "j1"
    assert dict(found["job"].attributes)["packhouse.dataset"] == dataset
    for phase in ("scanning", "encoding"):
        assert found[phase].parent.span_id == found["job"].context.span_id
    assert found["scanning"].end_time <= found["encoding"].start_time


def test_a_job_that_fails_is_an_error(service: Any, spans: Any, tmp_path: Path, tokenizer_dir: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("no\n")
    with pytest.raises(InvalidRequest, match="1 of 1 records"):
        job(service, spans, JobSpec(sources=[str(tmp_path)], tokenizer=str(tokenizer_dir)))
    assert "1 of 1 records" in spans.found()["job"].status.description


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_request_is_a_span_under_its_callers(service: Any, spans: Any) -> None:
    app = create_app(replace(service.parts, metrics=Metrics(), traces=spans))
    caller = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        await http.get("/v1/jobs/none", headers=caller)
        await http.get("/metrics")
        await http.get("/livez")
    (span,) = spans.found().values()
    assert (span.name, span.context.trace_id) == ("GET /v1/jobs/{job_id}", int("a" * 32, 16))
    assert span.attributes["http.response.status_code"] == 404


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A server that takes what is posted: its address, and the paths and bodies."""
    taken: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        """Takes everything."""

        def do_POST(self) -> None:
            taken.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", taken
        server.shutdown()


def test_spans_are_sent_to_the_collector_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as (url, taken):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        assert Settings.load().traces
        with exported(True) as traces, traces.get_tracer("test").start_as_current_span("a span of mine"):
            pass
    ((path, body),) = taken
    assert path == "/v1/traces"
    assert b"a span of mine" in body
    assert b"packhouse" in body


def test_a_collector_that_is_gone_does_not_keep_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with exported(True) as traces:
        with traces.get_tracer("test").start_as_current_span("lost"):
            pass
        begun = time.monotonic()
    assert time.monotonic() - begun < 6


def test_traces_that_cannot_be_made_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    with pytest.raises(InvalidRequest, match=r"is not installed: pip install 'packhouse\[otel\]'"), exported(True):
        pass


def test_without_a_collector_there_are_none() -> None:
    assert not Settings.load({}).traces
    with exported(False) as traces:
        assert traces is NO_TRACES
