"""The compose file: valid, closed, its secrets in files, and what it mounts is there."""

import ast
import json
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url
from tests.deploy.tools import DEPLOY, checker, load, run

COMPOSE = load("compose/compose.yaml")
VARIABLES = {"SOURCES": "/srv/corpora", "STORE_BUDGET": "", "WORKER_CPUS": "4", "WORKER_MEMORY": "6g"}
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def test_it_is_a_compose_file() -> None:
    compose_spec = pytest.importorskip("compose_spec", reason="compose-spec is not installed: make deploy-tools")
    text = re.sub(r"\$\{(\w+)[^}]*\}", lambda found: VARIABLES[found[1]], json.dumps(COMPOSE))
    parsed = compose_spec.PyCompose.from_json(text)
    assert set(parsed.service_names()) == set(SERVICES)
    broken = json.dumps({"services": {"one": {"image": "a", "ports": [{"target": "no number"}]}}})
    with pytest.raises(ValueError):
        compose_spec.PyCompose.from_json(broken)


def test_ports_are_published_on_loopback_only() -> None:
    ports = {name: port for name, one in SERVICES.items() for port in one.get("ports", [])}
    assert set(ports) == {"service", "prometheus", "grafana"}
    assert all(port.startswith("127.0.0.1:") for port in ports.values())


def test_ray_database_and_store_have_no_way_out() -> None:
    assert COMPOSE["networks"]["inside"] == {"internal": True}
    for name in ("ray-head", "ray-worker", "database", "s3", "bucket"):
        assert SERVICES[name]["networks"] == ["inside"]
    for name in ("service", "ray-head", "ray-worker"):
        assert SERVICES[name]["environment"]["RAY_AUTH_MODE"] == "token"


def test_secrets_come_by_file() -> None:
    for name, one in SERVICES.items():
        for variable, value in one.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|TOKEN|CREDENTIALS|DATABASE_URL", variable):
                assert variable.endswith(("_FILE", "_PATH")), (name, variable)
                assert value.removeprefix("/run/secrets/") in one["secrets"]
        assert set(one.get("secrets", [])) <= set(COMPOSE["secrets"])


def test_images_are_pinned_and_ours_have_no_rights() -> None:
    for name, one in SERVICES.items():
        assert re.search(r":v?\d+\.\d+", one["image"]), name
        assert one["restart"] in ("unless-stopped", "on-failure")
        if one["image"].startswith("packhouse/"):
            assert one["cap_drop"] == ["ALL"]
            assert one["security_opt"] == ["no-new-privileges:true"]


def test_who_waits_for_health_waits_for_one_that_is_told() -> None:
    for one in SERVICES.values():
        for name, how in one.get("depends_on", {}).items():
            assert how["condition"] in ("service_healthy", "service_completed_successfully")
            ours = SERVICES[name]["image"].startswith("packhouse/")  # the image brings its own
            assert how["condition"] != "service_healthy" or ours or "healthcheck" in SERVICES[name]


def test_what_is_mounted_is_there() -> None:
    for one in SERVICES.values():
        for volume in one.get("volumes", []):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (DEPLOY / "compose" / source).exists(), source
            elif not source.startswith("$"):
                assert source in COMPOSE["volumes"]
    for build in (one["build"] for one in SERVICES.values() if "build" in one):
        assert (DEPLOY / "compose" / build["context"] / build["dockerfile"]).exists()


def test_the_bucket_is_made_in_the_store_that_the_service_uses() -> None:
    (script,) = SERVICES["bucket"]["command"]
    calls = {
        node.func.attr: node
        for node in ast.walk(ast.parse(script))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    (bucket,) = (ast.literal_eval(argument) for argument in calls["create_dir"].args)
    store = SERVICES["service"]["environment"]["PACKHOUSE_STORE"]
    assert store.startswith(f"s3://{bucket}/")
    assert "endpoint_override=s3:8333" in store
    assert 'endpoint_override="s3:8333"' in script


def test_the_script_makes_every_secret_once(tmp_path: Path) -> None:
    script = shutil.copy(DEPLOY / "compose" / "make-secrets.sh", tmp_path)
    subprocess.run([script], check=True)
    made = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    assert {Path(secret["file"]).name for secret in COMPOSE["secrets"].values()} - set(made) == {"metrics_token"}
    url = make_url(made["database_url"].strip())
    assert (url.password, url.host, url.database) == (made["database_password"], "database", "packhouse")
    (identity,) = json.loads(made["s3_server.json"])["identities"]
    assert identity["credentials"][0]["secretKey"] == made["s3_secret"]
    assert f"aws_secret_access_key = {made['s3_secret']}\n" in made["s3_credentials"]
    assert len({made[name] for name in ("database_password", "ray_token", "grafana_password", "s3_secret")}) == 4
    assert all(len(made[name]) == 48 for name in ("database_password", "ray_token"))
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700
    subprocess.run([script], check=True)
    assert {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()} == made
    assert "secrets/" in (DEPLOY / "compose" / ".gitignore").read_text().splitlines()


def test_prometheus_scrapes_the_service() -> None:
    run(checker("promtool"), "check", "config", "--syntax-only", "compose/prometheus.yaml")
    config = load("compose/prometheus.yaml")
    assert config["scrape_configs"][0]["static_configs"] == [{"targets": ["service:7077"]}]
    assert config["scrape_configs"][0]["authorization"]["credentials_file"] == "/run/secrets/metrics_token"
    assert SERVICES["prometheus"]["secrets"] == ["metrics_token"]
    assert "> secrets/metrics_token.new" in (DEPLOY / "compose" / "make-tokens.sh").read_text()
    mounts = " ".join(SERVICES["prometheus"]["volumes"])
    assert all(f":{file}:ro" in mounts for file in config["rule_files"])
