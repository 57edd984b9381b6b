"""The log: every line names its job and its request, as text or as JSON; and every request has an id."""

import json
import logging
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from packhouse.client.api import Client, JobFailed
from packhouse.client.errors import InvalidRequest
from packhouse.client.wire import JobSpec
from packhouse.service import logs
from packhouse.service.app import create_app
from packhouse.service.metrics import Metrics
from packhouse.service.settings import Settings

Lines = list[dict[str, str]]


@pytest.fixture
def json_log(caplog: pytest.LogCaptureFixture) -> Any:
    """A function that returns what was logged so far, read back from its JSON lines."""
    caplog.handler.setFormatter(logs.JsonLines())
    caplog.set_level(logging.DEBUG, "packhouse")
    return lambda: [json.loads(line) for line in caplog.text.splitlines()]


def test_a_jobs_lines_bear_its_id(service: Any, json_log: Any, tmp_path: Path, tokenizer_dir: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\nno\n')
    with Client(service.url) as client:
        job = client.submit(JobSpec(sources=[str(tmp_path)], tokenizer=str(tokenizer_dir)))
        with pytest.raises(JobFailed):
            client.wait(job.id)
    lines = [line for line in json_log() if line.get("job") == job.id]
    assert [line["message"].split(":")[0] for line in lines] == ["it begins", f"job {job.id} failed"]
    assert lines[0]["level"] == "INFO"
    assert lines[0]["logger"] == "packhouse.service.observed"
    assert lines[0]["time"].endswith("+00:00")


def test_a_request_has_an_id_of_its_own_or_the_one_it_brings(service: Any, json_log: Any) -> None:
    given = {"x-request-id": "trainer-7.step_3"}
    assert httpx.get(f"{service.url}/livez", headers=given).headers["x-request-id"] == "trainer-7.step_3"
    for hostile in ("", "a" * 65, 'x" {'):
        answer = httpx.get(f"{service.url}/livez", headers={"x-request-id": hostile})
        assert len(answer.headers["x-request-id"]) == 16
    (line,) = (line for line in json_log() if line.get("request") == "trainer-7.step_3")
    assert line["message"].startswith("GET /livez: 200 after ")


def test_an_exception_stays_in_its_line(json_log: Any) -> None:
    try:
        raise ValueError("half\na loaf")
    except ValueError:
        with logs.bound(job="j1"), logs.bound(request="r1"):
            logging.getLogger("packhouse.test").exception("it\nfailed")
    (line,) = json_log()
    assert (line["message"], line["job"], line["request"]) == ("it\nfailed", "j1", "r1")
    assert "half\na loaf" in line["exception"]


def test_what_is_bound_ends_with_its_context(caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.setFormatter(logs.TextLines())
    log = logging.getLogger("packhouse.test")
    with logs.bound(job="j1"):
        log.warning("inside")
        with pytest.raises(RuntimeError), logs.bound(job="j2"):
            raise RuntimeError
        log.warning("inside again")
    log.warning("outside")
    texts = [line.split("packhouse.test: ")[1] for line in caplog.text.splitlines()]
    assert texts == ["[job j1] inside", "[job j1] inside again", "outside"]


def test_the_program_logs_in_json_when_told(tmp_path: Path) -> None:
    script = (
        "import logging, warnings; from packhouse.service import logs; logs.set_up('json', 'WARNING');"
        "logging.getLogger('x').info('not shown'); logging.getLogger('x').error('shown'); warnings.warn('odd')"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    lines: Lines = [json.loads(line) for line in run.stderr.splitlines()]
    assert [(line["logger"], line["level"]) for line in lines] == [("x", "ERROR"), ("py.warnings", "WARNING")]


def test_settings_of_the_log() -> None:
    settings = Settings.load({"PACKHOUSE_LOG_FORMAT": "json", "PACKHOUSE_LOG_LEVEL": "DEBUG"})
    assert (settings.log_format, settings.log_level) == ("json", "DEBUG")
    with pytest.raises(InvalidRequest, match=r"PACKHOUSE_LOG_FORMAT is 'xml': set it to text or json"):
        Settings.load({"PACKHOUSE_LOG_FORMAT": "xml"})
    with pytest.raises(InvalidRequest, match="PACKHOUSE_LOG_LEVEL is 'LOUD'"):
        Settings.load({"PACKHOUSE_LOG_LEVEL": "LOUD"})


def test_an_answer_does_not_wait_for_the_client(service: Any) -> None:
    """Without TCP_NODELAY each answer on a kept connection takes the 40 ms of the client's delayed acknowledgement."""
    with httpx.Client(base_url=service.url) as http:
        http.get("/livez")
        times = []
        for _ in range(15):
            begun = time.perf_counter()
            http.get("/livez")
            times.append(time.perf_counter() - begun)
    assert min(times) < 0.03


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_fault_is_found_by_the_id_of_its_request(service: Any, json_log: Any) -> None:
    metrics = Metrics()
    app = create_app(replace(service.parts, metrics=metrics))
    app.add_api_route("/fault", lambda: 1 / 0)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        answer = await http.get("/fault", headers={"x-request-id": "r-17"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "r-17")
    assert "trace r-17" in answer.json()["detail"]
    assert any("trace r-17: GET /fault failed" in line["message"] for line in json_log())
    labels = {"method": "GET", "route": "/fault", "status": "5xx"}
    assert metrics.registry.get_sample_value("packhouse_http_request_duration_seconds_count", labels) == 1
