"""The container files: small, not root, pinned, from the lock; and every setting that deploy/ uses is one."""

import re
import tomllib
from pathlib import Path

import pytest
from tests.deploy.tools import DEPLOY, ROOT, Recording, checker, load, run

from packhouse.service.settings import Settings

ROLES = ("service", "worker", "trainer")


def instructions(role: str) -> list[str]:
    text = (DEPLOY / "containers" / f"{role}.Dockerfile").read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("role", ROLES)
def test_hadolint_finds_nothing(role: str) -> None:
    run(checker("hadolint"), "--failure-threshold", "style", str(DEPLOY / "containers" / f"{role}.Dockerfile"))


@pytest.mark.parametrize("role", ROLES)
def test_an_image_is_pinned_not_root_and_asked_after(role: str) -> None:
    lines = instructions(role)
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert len(bases) == 2
    assert all(re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base) for base in bases)
    last = lines[max(number for number, line in enumerate(lines) if line.startswith("FROM ")) :]
    assert "USER 10001:10001" in last
    assert not any(line.startswith(("RUN", "COPY")) for line in last[last.index("USER 10001:10001") :])
    assert any(line.startswith("HEALTHCHECK ") for line in last)
    assert any(line.startswith('ENTRYPOINT ["') for line in last)


@pytest.mark.parametrize("role", ROLES)
def test_an_image_is_built_from_the_lock_and_from_files_that_are_there(role: str) -> None:
    lines = instructions(role)
    (install,) = (line for line in lines if "pip install" in line)
    assert "--constraint requirements.lock" in install
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = re.findall(r'"\.\[([a-z,]+)\]"', install)
    assert set(wanted.split(",")) <= set(extras)
    assert "vision" in wanted  # each of them meets chats with pictures: to preview, to encode, to load pixels
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    for line in lines:
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
                assert any(source.startswith(entry[1:]) for entry in ignored if entry.startswith("!")), source


def versions(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {name.lower(): version for name, version in (line.split("==") for line in lines)}


def test_the_locks_do_not_disagree_and_ray_is_the_same_everywhere() -> None:
    base, ray = versions(ROOT / "requirements.lock"), versions(DEPLOY / "containers" / "ray.lock")
    assert not base.keys() & ray.keys()
    chart = (DEPLOY / "helm/packhouse/templates/raycluster.yaml").read_text()
    assert f"rayVersion: {base['ray']}\n" in chart


def test_every_variable_of_ours_is_a_setting() -> None:
    environment = Recording()
    Settings.load(environment)
    settings = {name for name in environment.asked if name.startswith("PACKHOUSE_")}
    used = {
        (path.name, name)
        for path in DEPLOY.rglob("*")
        if path.is_file() and path.suffix != ".json"
        for name in re.findall(r"\bPACKHOUSE_[A-Z_]+", path.read_text())
    }
    assert {name for _, name in used} - settings == set(), used
    assert {"PACKHOUSE_DATABASE_URL_FILE", "PACKHOUSE_RAY_ADDRESS", "PACKHOUSE_STORE"} <= {name for _, name in used}


def test_every_setting_is_told() -> None:
    environment = Recording()
    Settings.load(environment)
    told = (ROOT / "service" / "README.md").read_text()
    assert [name for name in sorted(environment.asked) if f"`{name}`" not in told] == []


def test_names_and_versions_agree() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart, values = load("helm/packhouse/Chart.yaml"), load("helm/packhouse/values.yaml")
    images = {values["image"]["service"], values["image"]["worker"]}
    images |= {one["image"] for one in load("compose/compose.yaml")["services"].values() if "build" in one}
    assert images == {f"packhouse/service:{version}", f"packhouse/worker:{version}"}
    assert chart["version"] == chart["appVersion"] == version
