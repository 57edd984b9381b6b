"""The page of a report: whole, self-contained, and with the numbers of the plan."""

import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

import pytest

from packhouse.client.plan_page import page
from packhouse.client.wire_plans import Plan, PlanSpec
from packhouse.worker.plans import build_plan

Make = Callable[..., Any]


@pytest.fixture
def plan(memory_store: Make, write_dataset: Make) -> Plan:
    store = memory_store()
    dataset = write_dataset(store, [[1] * n for n in (5, 3, 8, 2, 7, 7, 7, 1, 4, 0)])
    return build_plan(store, PlanSpec(datasets=[dataset], pack_length=8, ranks=2), write=False)


def test_the_page_is_well_formed_and_needs_nothing_else(plan: Plan) -> None:
    text = page(plan)
    body = text[text.index("<body>") : text.index("</html>")]
    root = ET.fromstring(body)
    assert len(root.findall(".//svg")) == 3
    assert "prefers-color-scheme:dark" in text
    for outside in ("<script", "src=", "href=", "url(", "@import"):
        assert outside not in text


def test_the_page_tells_the_plan(plan: Plan) -> None:
    text = page(plan)
    assert plan.id in text
    assert "dry run" in text
    assert f"{plan.report.padding:.3%}" in text
    for name in ("best_fit, shuffled", "best_fit, length_grouped", "this plan"):
        assert f"<td>{name}</td>" in text
    bars = [bar for bar in text.split("<title>")[2:] if "up to" in bar]
    lengths, fills = plan.report.lengths, plan.report.fills
    assert len(bars) == len(lengths.counts) + len(fills.counts)


def test_names_are_escaped(plan: Plan) -> None:
    hostile = plan.model_copy(update={"spec": plan.spec.model_copy(update={"datasets": ["<script>alert(1)</script>"]})})
    assert "<script>alert" not in page(hostile)


def test_a_step_is_as_wide_as_its_run_and_a_padded_last_one_stays_on_the_picture(plan: Plan) -> None:
    one = plan.report.cost.model_copy(update={"steps": [0], "low": [0.5], "mean": [1.0], "high": [1.5]})
    two = one.model_copy(update={"steps": [0, 7], "low": [0.9, 0.0], "mean": [1.0, 0.2], "high": [1.1, 0.4]})
    for curve, places in ((one, ["48.0", "680.0"]), (two, ["48.0", "364.0", "364.0", "680.0"])):
        text = page(plan.model_copy(update={"report": plan.report.model_copy(update={"cost": curve})}))
        line = text.split('class="mean" points="')[1].split('"')[0]
        assert [point.split(",")[0] for point in line.split()] == places
        assert all(0 <= float(point.split(",")[1]) <= 192 for point in line.split())
