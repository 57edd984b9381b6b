"""Alert rules, dashboard and runbook: they speak of metrics that exist, and of each other."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.deploy.tools import DEPLOY, checker, load, run
from typer.testing import CliRunner

from packhouse.client.cli import app
from packhouse.client.wire import Job

RULES: list[dict[str, Any]] = load("prometheus/rules.yaml")["groups"][0]["rules"]
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "packhouse.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [rule["expr"] for rule in RULES] + [target["expr"] for panel in PANELS for target in panel["targets"]]
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}


@pytest.fixture(scope="session")
def declared(service: Any, cached: Job) -> dict[str, set[str]]:
    """What /metrics declares, as rules may name it, each with the labels of its samples."""
    registry = service.parts.metrics.registry
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(httpx.get(f"{service.url}/metrics").text):
        for suffix in SUFFIXES[family.type]:
            instrument = registry._names_to_collectors.get(family.name + suffix)
            labels = {*getattr(instrument, "_labelnames", ()), *(name for one in family.samples for name in one.labels)}
            found[family.name + suffix] = labels - {"le"} | ({"le"} if suffix == "_bucket" else set())
    return found


def metrics(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the metrics of an expression, each with the labels that it is asked for."""
    for name, matchers in re.findall(r"\b(packhouse_\w+)(?:\{([^}]*)\})?", re.sub(r'"[^"]*"', '""', expression)):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))


def test_rules_and_dashboard_name_what_is_there(declared: dict[str, set[str]]) -> None:
    used = [one for expression in EXPRESSIONS for one in metrics(expression)]
    assert len(used) > 40
    for name, labels in used:
        assert name in declared, name
        assert labels <= declared[name] | {"instance", "job"}, (name, labels)
    for expression in EXPRESSIONS:
        grouped = {label for part in re.findall(r"by \(([^)]*)\)", expression) for label in re.split(r",\s*", part)}
        known = {label for name, _ in metrics(expression) for label in declared[name]}
        assert grouped <= known, expression


def test_what_is_declared_is_shown(declared: dict[str, set[str]]) -> None:
    """Whatever the service counts, some panel or rule shows it: or it need not be counted."""
    shown = {name.removesuffix("_bucket").removesuffix("_count") for text in EXPRESSIONS for name, _ in metrics(text)}
    names = {name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for name in declared}
    unseen = {name for name in names - shown if "_process_" not in name}
    assert unseen == {"packhouse_source_bytes_total"}  # for shares over months, by hand


def test_promtool_takes_the_rules() -> None:
    assert f"{len(RULES)} rules found" in run(checker("promtool"), "check", "rules", "prometheus/rules.yaml")


def test_each_alert_fires_when_it_should_and_only_then() -> None:
    run(checker("promtool"), "test", "rules", "rules_test.yaml", cwd=DEPLOY / "prometheus")
    silent, _, everything = load("prometheus/rules_test.yaml")["tests"]
    names = {rule["alert"] for rule in RULES}
    assert {one["alertname"] for one in silent["alert_rule_test"]} == names
    samples = everything["promql_expr_test"][0]["exp_samples"]
    assert {re.findall('alertname="(\\w+)"', one["labels"])[0] for one in samples} == names


def test_promtool_takes_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    expressions = [target["expr"] for panel in PANELS for target in panel["targets"]]
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, expression in enumerate(expressions)
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in run(checker("promtool"), "check", "rules", str(file))


def test_every_alert_has_its_section_and_every_section_its_alert() -> None:
    text = (DEPLOY / "README.md").read_text()
    sections = re.findall(r"^### (\w+)\n\n(.*?)(?=^##)", text, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in sections] == [rule["alert"] for rule in RULES]
    for name, body in sections:
        assert "\n1. " in body, f"{name} does not say what to do"
    for rule in RULES:
        assert rule["annotations"]["runbook"] == f"deploy/README.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_the_runbooks_commands_are_there() -> None:
    text = (DEPLOY / "README.md").read_text()
    commands = set(re.findall(r"`packhouse ((?:jobs |cache )?[a-z]+)", text)) - {"serve"}
    assert {"jobs show", "jobs rejected", "cache gc", "preview"} <= commands
    for command in commands:
        result = CliRunner().invoke(app, [*command.split(), "--help"])
        assert result.exit_code == 0, command


def test_the_dashboard_is_laid_out() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert all(panel["title"] and panel["description"] for panel in PANELS)
