"""A PostgreSQL server of the tests' own, where its programs are installed: on a socket in a temporary folder."""

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

NOBODY = 65534


def _programs() -> Path | None:
    """Return the folder of initdb and postgres; Debian keeps them off the PATH."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if found := shutil.which("initdb"):
        folders.insert(0, Path(found).resolve().parent)
    return next((folder for folder in folders if (folder / "postgres").exists()), None)


@contextmanager
def server() -> Iterator[Callable[[], str]]:
    """Run a server; yield a function that makes an empty schema and returns the URL that leads into it.

    Raises ``FileNotFoundError`` where it is not installed.
    """
    programs = _programs()
    if programs is None:
        raise FileNotFoundError("PostgreSQL is not installed (on Debian: apt-get install postgresql)")
    # The server refuses to run as root, and a socket's path must be short.
    user = NOBODY if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as folder:
        if user is not None:
            os.chown(folder, user, user)
        os.chmod(folder, 0o755)
        data = f"{folder}/data"
        run: dict[str, Any] = {"cwd": folder, "user": user, "group": user}
        run |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        setup = [f"{programs}/initdb", "-D", data, "-U", "packhouse", "--auth=trust", "--no-sync", "--encoding=UTF8"]
        subprocess.run([*setup, "--locale=C"], check=True, **run)
        options = ["-c", "listen_addresses=", "-c", "fsync=off", "-c", "max_connections=60", "-k", folder]
        process = subprocess.Popen([f"{programs}/postgres", "-D", data, *options], **run)
        try:
            wait = [f"{programs}/pg_isready", "-q", "-h", folder, "-U", "packhouse", "-d", "postgres"]
            while subprocess.run(wait, cwd=folder).returncode:
                assert process.poll() is None, "the PostgreSQL server ended"
            yield lambda: _schema(folder)
        finally:
            process.send_signal(signal.SIGINT)  # its fast way to stop: connections that are open are cut
            process.wait(30)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Callable[[], str]]:
    """Return a function that makes an empty schema and returns its URL; skip where there is no server to start."""
    pytest.importorskip("psycopg")
    with ExitStack() as stack:
        try:
            make = stack.enter_context(server())
        except FileNotFoundError as error:
            pytest.skip(str(error))
        yield make


def _schema(folder: str) -> str:
    """Make an empty schema, which is as good as a database and made at once; return the URL that leads into it."""
    import psycopg

    name = f"test_{secrets.token_hex(4)}"
    with psycopg.connect(host=folder, user="packhouse", dbname="postgres", autocommit=True) as connection:
        connection.execute(f'CREATE SCHEMA "{name}"')
    return f"postgresql://packhouse@/postgres?host={folder}&options=-csearch_path%3D{name}"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty database, of each kind in turn."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/packhouse.db"
    make: Callable[[], str] = request.getfixturevalue("postgres")
    return make()
