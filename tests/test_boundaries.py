"""The arrows between the portions: service → worker → client ← trainer, and what each may need."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = {
    "client": {"client"},
    "worker": {"worker", "client"},
    "service": {"service", "worker", "client"},
    "trainer": {"trainer", "client"},
}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{name.name}" for name in node.names)


@pytest.mark.parametrize("portion", ALLOWED)
def test_a_portion_imports_only_along_the_arrows(portion: str) -> None:
    files = sorted((ROOT / portion).rglob("*.py"))
    assert files
    for path in files:
        for name in imports(path):
            if name.startswith("packhouse."):
                assert name.split(".")[1] in ALLOWED[portion], f"{path} imports {name}"


def test_no_portion_claims_the_package() -> None:
    """One ``packhouse/__init__.py`` would hide the other three portions."""
    assert [path for portion in ALLOWED for path in (ROOT / portion).glob("packhouse/__init__.py")] == []


def test_the_bare_install_is_the_client() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {requirement.split(">")[0] for requirement in project["dependencies"]}
    assert names == {"httpx", "httpx-sse", "numpy", "pyarrow", "pydantic", "rich", "typer", "xxhash"}


def test_the_client_needs_no_extra() -> None:
    """Everything of the client but its torch side imports where nothing of the extras can be imported."""
    script = """
import sys
for name in (
    *("ray", "fastapi", "uvicorn", "transformers", "tokenizers", "torch", "orjson", "sqlalchemy", "numba", "PIL"),
):
    sys.modules[name] = None
import packhouse.client
import packhouse.client.api, packhouse.client.cli, packhouse.client.format, packhouse.client.pack
import packhouse.client.plan, packhouse.client.remote, packhouse.client.store
import packhouse.client.extra, packhouse.client.processor, packhouse.client.picture_files
import packhouse.client.handshake, packhouse.client.kernel, packhouse.client.ledger, packhouse.client.shard_cache
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_folder_and_file_says_what_it_is() -> None:
    for folder in [*ALLOWED, "deploy", "tests"]:
        assert (ROOT / folder / "README.md").read_text().startswith("# ")
    for portion in ALLOWED:
        for path in (ROOT / portion).rglob("*.py"):
            assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"
