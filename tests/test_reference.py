"""The reference in the READMEs is whole: each setting, each route and each command stands in its table."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from packhouse.client.cli import app as commands
from packhouse.service.access import LEAST
from packhouse.service.cli_token import token_app

ROOT = Path(__file__).parents[1]
SERVICE = (ROOT / "service" / "README.md").read_text(encoding="utf-8")
CLIENT = (ROOT / "client" / "README.md").read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """Return what stands under a heading, up to the next one."""
    (found,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    return str(found)


def test_each_setting_stands_in_a_table_and_each_of_the_tables_is_read() -> None:
    read = set()
    for portion in ("client", "service", "trainer", "worker"):
        for path in (ROOT / portion / "packhouse").rglob("settings.py"):
            read |= set(re.findall(r"\"(PACKHOUSE_[A-Z_]+)\"", path.read_text(encoding="utf-8")))
    tables = section(SERVICE, "Settings") + section(CLIENT, "Settings")
    rows = [line.split("|")[1] for line in tables.splitlines() if line.startswith("| `")]
    told = [name for row in rows for name in re.findall(r"PACKHOUSE_[A-Z_]+", row)]
    assert set(told) == read | {"PACKHOUSE_DATABASE_URL_FILE"}  # made of the name before it
    assert len(told) == len(set(told))


def test_no_other_file_reads_the_environment() -> None:
    for path in ROOT.glob("*/packhouse/**/*.py"):
        if path.name != "settings.py":
            assert not re.search(r"environ(\.get\(|\[)\W*PACKHOUSE_", path.read_text(encoding="utf-8")), path


def routes_told() -> set[tuple[str, str]]:
    """Return the routes of the service's table: ``…/x`` continues the path before it in its row."""
    found = set()
    for row in re.findall(r"^\| (`(?:GET|POST|PUT|DELETE|HEAD).*?) \|", section(SERVICE, "Contract"), re.MULTILINE):
        methods: list[str] = []
        base, last = "", ""
        for word in " ".join(re.findall(r"`(.*?)`", row)).split():
            if word.isupper():
                methods = [*methods, word] if last.isupper() else [word]
            else:
                base = base or word
                found |= {(method, plain(base + word[1:] if word.startswith("…") else word)) for method in methods}
            last = word
    return found


def plain(path: str) -> str:
    return re.sub(r"\{.*?\}", "{}", path)


@pytest.mark.parametrize("route", sorted(f"{method} {path}" for method, path in LEAST))
def test_each_route_stands_in_the_table(route: str) -> None:
    """That ``LEAST`` has each route of the application is a test of its own."""
    method, path = route.split()
    if path.startswith(("/v1/", "/livez", "/readyz", "/metrics", "/openapi.json")):
        assert (method, plain(path)) in routes_told()


def test_each_route_of_the_table_is_there() -> None:
    there = {(method, plain(path)) for method, path in LEAST}
    assert {one for one in routes_told() if one not in there and one[0] != "HEAD"} == set()


def all_commands(group: Any, name: str) -> Iterator[str]:
    for word, command in group.commands.items():
        if getattr(command, "commands", None):
            if getattr(command, "invoke_without_command", False):
                yield f"{name} {word}"
            yield from all_commands(command, f"{name} {word}")
        else:
            yield f"{name} {word}"


def test_each_command_stands_in_the_table() -> None:
    there = {*all_commands(typer.main.get_command(commands), "packhouse")} - {"packhouse token"}
    there |= {*all_commands(typer.main.get_command(token_app), "packhouse token")}
    rows = re.findall(r"^\| (`packhouse .*?) \|", section(CLIENT, "Commands"), re.MULTILINE)
    told = [re.match(r"packhouse( [a-z]+)+", command) for row in rows for command in re.findall(r"`(.*?)`", row)]
    assert {found[0] for found in told if found} == there


READMES = [ROOT / folder / "README.md" for folder in ("", "client", "deploy", "service", "tests", "trainer", "worker")]


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_links_lead_somewhere(readme: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", readme.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if target.startswith("http"):
            continue
        place = readme.parent / path if path else readme
        assert place.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", place.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, target
