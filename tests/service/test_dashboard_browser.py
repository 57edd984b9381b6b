"""The dashboard in a real browser: followed jobs, the keyboard, a phone, the dark, and no request to anyone else."""

import json
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.browser import Browser, Page, chromium
from tests.conftest import settled

from packhouse.client.api import Client, JobFailed
from packhouse.client.wire import Job, JobSpec
from packhouse.client.wire_plans import PlanSpec

AXE = Path(__file__).resolve().parents[2] / "build/axe/axe.min.js"
EVIL = "<img src=x onerror=alert(1)>"
PHONE = {"width": 360, "height": 760}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as running:
        yield running


@dataclass(frozen=True)
class Dashboard:
    """A service with something on each page."""

    url: str
    job: Job
    pages: dict[str, str]
    """By name, the address of each."""


@pytest.fixture(scope="module")
def dashboard(
    service: Any, browser: Browser, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Dashboard:
    """A job whose source and bad lines try to be markup, a dataset and a plan of it, and a job that failed."""
    source = tmp_path_factory.mktemp(EVIL) / f"{EVIL}.jsonl"
    lines = [json.dumps({"text": f"text {number}"}) for number in range(100)]
    source.write_text("\n".join([*lines, f"{EVIL} \u202e not JSON", '{"txt": 1}']))
    settled(source)  # or its lines would not be shown
    with Client(service.url) as client:
        spec = JobSpec(sources=[str(source)], tokenizer=str(tokenizer_dir), max_bad_share=0.5, name=EVIL + "long" * 40)
        job = client.wait(client.submit(spec).id)
        failing = client.submit(spec.model_copy(update={"max_bad_share": 0.0, "name": "failing"})).id
        plan = client.plan(PlanSpec(datasets=[str(job.dataset)], pack_length=64, ranks=2, micro_batches=2))
        with pytest.raises(JobFailed):
            client.wait(failing)
    paths = {name: f"/{name}" for name in ("", "jobs", "datasets", "plans", "store?budget=1MB", "preview", "login")}
    paths |= {"job": f"/jobs/{job.id}", "failed": f"/jobs/{failing}", "error": "/jobs/nothing"}
    paths |= {"dataset": f"/datasets/{job.dataset}", "plan": f"/plans/{plan.id}"}
    return Dashboard(service.url, job, {name: service.url + path for name, path in paths.items()})


def alone(page: Page, url: str) -> None:
    """Check that a page complained of nothing and asked nobody but its own service."""
    assert [one for one in page.complaints if "404" not in one or "/jobs/nothing" not in one] == []
    assert {urlsplit(one).netloc for one in page.requests} == {urlsplit(url).netloc}


WATCHING = """addEventListener("DOMContentLoaded", () => {
  window.shares = [];
  const look = () => { const bar = document.querySelector("progress"); if (bar) shares.push(bar.value); };
  new MutationObserver(look).observe(document, { subtree: true, childList: true, attributes: true });
  look();
})"""


@pytest.fixture
def loaded(service: Any, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the pages are there: no task of a job ends before, and from then on one in half a second."""
    event, wait = threading.Event(), service.parts.executor.wait

    def slow(*args: Any, **kwargs: Any) -> Any:
        ended = wait(*args, **kwargs)
        if ended:
            event.wait(60)
            time.sleep(0.5)
        return ended

    monkeypatch.setattr(service.parts.executor, "wait", slow)
    return event


def test_a_job_is_followed_without_a_reload(
    browser: Browser,
    service: Any,
    dashboard: Dashboard,
    corpus: Path,
    tokenizer_dir: Path,
    tmp_path: Path,
    loaded: threading.Event,
) -> None:
    """On the overview, on its own page, and where there is no stream of events."""
    source = tmp_path / "part.jsonl"
    source.write_bytes(corpus.read_bytes()[: 20 << 20].rpartition(b"\n")[0])
    with browser.page() as overview, browser.page() as page, browser.page() as polling, Client(service.url) as client:
        page.before_scripts(WATCHING)
        polling.before_scripts("delete window.EventSource")
        overview.open(dashboard.pages[""])
        overview.run("window.mark = 1")
        job = client.submit(JobSpec(sources=[str(source)], tokenizer=str(tokenizer_dir), max_length=77, name="live"))
        url = f"{service.url}/jobs/{job.id}"  # both pages at once, while it runs
        page.loading(lambda: polling.loading(lambda: [one.call("Page.navigate", url=url) for one in (page, polling)]))
        for one in (page, polling):
            one.run("window.mark = 1")
        line = f"document.querySelector('#job-{job.id}')"
        overview.wait(f"{line} !== null")
        overview.run(f"{line}.querySelector('a').focus()")
        loaded.set()
        client.wait(job.id)
        overview.wait(f"{line}.querySelector('.state').textContent === 'succeeded'")
        for one in (page, polling):
            one.wait("document.querySelector('.headline .state').textContent === 'succeeded'")
            assert one.run("document.querySelector('progress')") is None
            assert one.run("document.querySelectorAll('.phases .past').length") == 4
            assert "dataset" in one.run("document.querySelector('[data-live]').innerText")
        shares = page.run("window.shares")
        assert shares == sorted(shares)
        assert any(0 < share < 100 for share in shares)
        assert overview.run(f"document.activeElement === {line}.querySelector('a')")
        for one in (overview, page, polling):
            assert one.run("window.mark") == 1
            alone(one, service.url)
        assert any("once=true" in one for one in polling.requests)
        assert not any("once=true" in one for one in overview.requests + page.requests)
        asked = len(page.requests) + len(polling.requests)
        page.run("new Promise((done) => setTimeout(done, 2300))")
        assert len(page.requests) + len(polling.requests) == asked


RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_page_is_hard_to_see_or_to_use(browser: Browser, dashboard: Dashboard, dark: bool) -> None:
    if not AXE.exists():
        pytest.skip("axe-core is not there: make browser-tools")
    axe = AXE.read_text()
    found = {}
    with browser.page(dark=dark) as page:
        for name, url in dashboard.pages.items():
            page.open(url)
            page.run(f"{axe}; 0")
            page.run("document.querySelectorAll('details').forEach((one) => one.open = true)")
            wanted = ["color-contrast"] if dark else RULES
            faults = page.run(
                f"axe.run({{runOnly: {wanted}}}).then(({{violations}}) => violations.map((one) =>"
                " [one.id, one.nodes.slice(0, 3).map((node) => node.html.slice(0, 160))]))"
            )
            if faults:
                found[name] = faults
        assert found == {}
        background = page.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(","))) < 200) is dark


def test_pages_fit_a_phone_and_ask_nobody_else(browser: Browser, dashboard: Dashboard) -> None:
    with browser.page(**PHONE) as page:
        for name, url in dashboard.pages.items():
            page.open(url)
            width = page.run("Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)")
            assert width <= PHONE["width"], name
            small = page.run(
                "[...document.querySelectorAll('header a, button, input, select')].filter((one) =>"
                " one.offsetHeight && one.offsetHeight < 24).map((one) => one.outerHTML)"
            )
            assert small == [], name
        alone(page, dashboard.url)


def test_what_lines_and_names_hold_is_shown_and_never_run(browser: Browser, dashboard: Dashboard) -> None:
    with browser.page() as page:
        for name in ("", "job", "dataset", "jobs", "datasets"):
            page.open(dashboard.pages[name])
            assert EVIL in page.run("document.querySelector('main').innerText"), name
            assert page.run("document.querySelectorAll('main img').length") == 0
        page.open(dashboard.pages["job"])
        assert page.run("document.querySelector('.line pre').innerText") == f"{EVIL} [U+202E] not JSON"
        alone(page, dashboard.url)


REACHABLE = """window.all = () => [...document.querySelectorAll(
    "a[href], button, input, select, textarea, summary, [tabindex='0']")].filter((one) => one.checkVisibility())"""
FOCUS = "[parseFloat(getComputedStyle(document.activeElement).outlineWidth), all().indexOf(document.activeElement)]"


def test_the_keyboard_reaches_everything_and_shows_where_it_is(browser: Browser, dashboard: Dashboard) -> None:
    with browser.page() as page:
        for name in ("", "job", "preview"):
            page.open(dashboard.pages[name])
            page.run(f"{REACHABLE}; 0")
            count, seen = page.run("all().length"), []
            for _ in range(count):
                page.press("Tab")
                outline, at = page.run(FOCUS)
                assert outline >= 2, (name, at)
                seen.append(at)
            assert seen == list(range(count)), name
        page.open(dashboard.pages[""])
        page.press("Tab")
        page.press("Enter")
        page.wait("document.activeElement.id === 'main'")
        page.press("Tab")
        assert page.run("document.querySelector('main').contains(document.activeElement)")


def test_a_preview_by_keyboard(browser: Browser, dashboard: Dashboard, tokenizer_dir: Path, tmp_path: Path) -> None:
    source = tmp_path / "chats.jsonl"
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": EVIL}]
    source.write_text(json.dumps({"messages": said}))
    with browser.page(still=True) as page:
        page.open(dashboard.pages["preview"])
        page.run("document.querySelector('#source').focus()")
        page.type(str(source))
        page.press("Tab")
        page.type(str(tokenizer_dir))
        page.loading(lambda: page.press("Enter"))
        assert page.run("document.querySelector('.sample mark').textContent") == EVIL + "<|im_end|>"
        assert page.run("document.activeElement.id") == "shown"
        assert page.run("document.querySelector('#source').value") == str(source)
        assert math.isclose(float(page.run("parseFloat(getComputedStyle(document.body).transitionDuration)")), 0)
        page.run("document.querySelector('#source').value = '/nowhere'")
        page.loading(lambda: page.run("document.querySelector('form').submit()"))
        assert "/nowhere" in page.run("document.querySelector('[role=alert]').innerText")
