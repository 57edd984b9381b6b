"""Pages of the dashboard as they are served: escaped, bounded, right, and quick over a full catalog."""

import json
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder
from sqlalchemy import insert, update
from tests.service.house import House, job

from packhouse.client.wire import Change, JobSpec, JobState, Miss, Problem, Progress
from packhouse.client.wire_plans import PlanSpec
from packhouse.service.tables import DatasetRow, ShardRow
from packhouse.worker.plans import build_plan

ROOT = Path(__file__).resolve().parents[2]
EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"

WriteDataset = Callable[..., str]


PATHS = ("/", "/?window=week", "/jobs", "/jobs?state=failed", "/datasets", "/plans", "/store", "/preview")


@pytest.mark.parametrize("path", PATHS)
def test_an_empty_service_has_whole_pages_that_need_nothing_from_elsewhere(house: House, path: str) -> None:
    answer = house.web.get(path)
    assert answer.status_code == 200
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    text = answer.text
    assert text.count("<h1") == text.count("<main") == 1
    assert not re.findall(r"https?://|<style|\sstyle=|\son\w+=|<script(?! src=\"/static/)", text)
    for link in set(re.findall(r'(?:href|src)="(/[^"]*)"', text)) - {"/openapi.json"}:
        assert house.web.get(link).status_code == 200, link


def test_what_others_wrote_is_text_and_never_markup(house: House, write_dataset: WriteDataset) -> None:
    dataset = write_dataset(house.store, [[1, 2, 3]], tokenizer=EVIL)
    house.inventory.add_dataset(house.store, dataset)
    miss = Miss(reason=EVIL, blocks=1, bytes=9, recipe="b" * 32, changes=[Change(field=EVIL, old=EVIL, new=[EVIL])])
    names: dict[str, Any] = {
        "misses": {EVIL: 1},
        "why": [miss],
        "engines": {EVIL: 1},
        "fallbacks": {EVIL: 1},
        "rejected": {EVIL: 1},
    }
    progress = Progress(phase="done", blocks=1, mb_per_s=1.0, **names)
    spec = JobSpec(sources=[f"/{EVIL}"], tokenizer=f"/{EVIL}", name=EVIL, template=EVIL + "\n", fields={EVIL: EVIL})
    error = Problem(title=EVIL, status=500, detail=EVIL, remedy=EVIL)
    told: dict[str, Any] = {"spec": spec, "progress": progress, "warnings": [EVIL], "dataset": dataset, "error": error}
    recent = datetime.now(UTC)
    house.add(job(1, **told, ended=recent), job(2, JobState.FAILED, **told, ended=recent))
    paths = ["/", "/jobs", "/datasets", f"/datasets/{dataset}", f"/jobs/{1:016x}", f"/jobs/{2:016x}", "/store"]
    paths += ["/live/jobs?once=true", f"/live/jobs/{1:016x}?once=true", f"/preview?job={1:016x}"]
    for path in paths:
        text = house.get(path)
        assert "alert(1)" in text, path
        assert not re.findall(r"<script>|<img src=x|\"'>", text), path
    for path in ("/jobs/<script>", f"/?window={EVIL}", f"/jobs?state={EVIL}", f"/store?budget={EVIL}"):
        answer = house.web.get(path)
        assert not re.findall(r"<script>|<img src=x", answer.text), path


def test_errors_are_pages_with_the_remedy(house: House) -> None:
    for path, status, words in (
        ("/jobs/none", 404, "there is no job"),
        (f"/datasets/{'0' * 32}", 404, "there is no dataset"),
        ("/datasets/x", 404, "32 hexadecimal digits"),
        (f"/plans/{'0' * 32}", 404, "there is no plan"),
        ("/?window=year", 422, "choose day, week, month"),
        ("/datasets?offset=-1", 422, "offset"),
        ("/static/../pages.py", 404, "nothing"),
        ("/static/nothing.js", 404, "no file"),
    ):
        text = house.get(path, status)
        assert words in text, path


def test_the_page_of_a_dataset_has_its_figures(house: House, write_dataset: WriteDataset) -> None:
    samples = [[1] * length for length in (1, 3, 4, 5, 100)]
    masks = [[0] * len(one) for one in samples[:-1]] + [[1] * 100]
    dataset = write_dataset(house.store, samples, masks)
    house.inventory.add_dataset(house.store, dataset)
    plan = build_plan(house.store, PlanSpec(datasets=[dataset], pack_length=64), write=True)
    house.inventory.add_plan(plan.id, 100, [dataset])
    house.inventory.pin(dataset, True)
    text = house.get(f"/datasets/{dataset}")
    assert "Median 4, longest 100" in text
    assert "1 up to 1, 2 up to 4, 1 up to 8, 1 up to 128" in text
    assert re.search(r"88\.5%</b>", text)
    assert f'href="/plans/{plan.id}"' in text
    assert "pinned" in text
    page = house.get(f"/plans/{plan.id}")
    assert page.count("<svg viewBox") == 3
    assert f'href="/datasets/{dataset}"' in page
    for path in ("/datasets", "/plans", "/store"):
        assert dataset in house.get(path)


def test_what_eviction_would_take_is_foreseen_and_stays(house: House, write_dataset: WriteDataset) -> None:
    dataset = write_dataset(house.store, [[1, 2, 3]])
    house.inventory.add_dataset(house.store, dataset)
    with house.catalog.engine.begin() as connection:
        for table in (DatasetRow, ShardRow):
            connection.execute(update(table).values(used_at=0))
    text = house.get("/store?budget=0")
    assert f"<code>{dataset}</code>" in text
    assert "would go</dt><dd><b>0 B" not in text
    assert "Nothing would go" in house.get("/store?budget=1TB")
    assert "is not a size" in house.get("/store?budget=much")
    assert "there is no budget to keep" in house.get("/store?budget=")
    assert house.store.size(f"datasets/{dataset}.json")


def form(**fields: str) -> dict[str, str]:
    return {"source": "/nowhere.jsonl", "tokenizer": "/nowhere", "records": "3", **fields}


def test_the_preview_marks_what_is_trained(house: House, tmp_path: Path, tokenizer_dir: Path) -> None:
    source = tmp_path / "chats.jsonl"
    said = [{"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": "<i>Hello</i>"}]
    source.write_text(json.dumps({"messages": said}) + "\nbroken\n")
    answer = house.web.post("/preview", data=form(source=str(source), tokenizer=str(tokenizer_dir)))
    assert answer.status_code == 200
    marks = re.findall(r"<mark title=\"\d+ tokens, trained\">([^<]*)</mark>", answer.text)
    assert marks == ["&lt;i&gt;Hello&lt;/i&gt;&lt;|im_end|&gt;"]
    assert "line 2: invalid_json" in answer.text
    assert f'value="{source}"' in answer.text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"source": ""}, "a source is missing"),
        ({}, "No such file"),
        ({"max_length": "many"}, "is not a whole number"),
        ({"max_length": "0"}, "greater than or equal to 1"),
        ({"records": "1000"}, "less than or equal to 100"),
        ({"loss": "most"}, "loss"),
        ({"fields": "prompt"}, "is not a pair"),
    ],
)
def test_a_form_that_cannot_work_says_why_and_keeps_what_was_typed(
    house: House, fields: dict[str, str], words: str
) -> None:
    answer = house.web.post("/preview", data=form(**fields))
    assert answer.status_code == 422
    assert words in answer.text
    assert 'role="alert"' in answer.text
    assert 'name="tokenizer" value="/nowhere"' in answer.text


def test_a_form_of_another_site_or_of_any_length_is_refused(house: House) -> None:
    crossing = house.web.post("/preview", data=form(), headers={"sec-fetch-site": "cross-site"})
    assert crossing.status_code == 403
    assert "another site" in crossing.text
    assert house.web.post("/preview", content=b"source=" + b"x" * (9 << 20)).status_code == 413
    assert house.web.post("/preview", content="&".join("a=1" for _ in range(1000))).status_code == 422


def test_pages_are_quick_over_a_full_catalog(house: House) -> None:
    now, at = datetime.now(UTC), time.time()
    house.add(
        *(job(number, ended=now - timedelta(minutes=number), dataset=f"{number:032x}") for number in range(10_000))
    )
    row = {"recipe": "a" * 32, "shards": 1_000_000, "bytes": 10**12, "pinned": False, "evicted_at": None}
    rows = [row | {"id": f"{number:032x}", "created_at": at - number, "used_at": at} for number in range(1000)]
    with house.catalog.engine.begin() as connection:
        connection.execute(insert(DatasetRow), rows)
    house.get("/")  # the first look at the jobs is kept
    for path in ("/", "/?window=month", "/live/jobs?once=true", "/jobs", "/datasets?offset=960", "/store"):
        spent = []
        for _ in range(3):
            begun = time.perf_counter()
            text = house.get(path)
            spent.append(time.perf_counter() - begun)
        assert min(spent) < 0.4, (path, spent)
        assert len(text) < 200_000
    assert "1,000, the newest first" in house.get("/datasets")
    last = re.findall(r'href="(/jobs\?[^"]*after=[^"]*)"', house.get("/jobs"))[0]
    assert "source-9959.jsonl" in house.get(last)


def test_style_script_and_templates_are_in_the_wheel() -> None:
    files = {one.distribution_path for one in WheelBuilder(str(ROOT)).recurse_included_files()}
    here = "packhouse/service/dashboard"
    for folder in ("templates", "static"):
        for path in (ROOT / "service" / here / folder).iterdir():
            assert f"{here}/{folder}/{path.name}" in files
