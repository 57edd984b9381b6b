"""Settings of the service: the only file of this portion that reads environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Self

from packhouse.client.errors import InvalidRequest

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 7077


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything the service can be told, built once and passed down."""

    home: Path
    """Folder of the lock, the database and, unless told otherwise, the store."""
    store: str
    """Folder of shards, manifests and plans."""
    database_url: str
    """SQLAlchemy URL of the job table."""
    ray_address: str | None = None
    """Address of a Ray cluster; None starts a local one."""
    cpus: int | None = None
    """CPUs of the local Ray; None takes all."""
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    """0 picks a free one."""
    jobs_at_once: int = 2
    """Jobs that run side by side; the others wait in the order they came."""
    heartbeat: float = 10.0
    """Seconds without news after which an event stream sends a comment."""
    stop_within: float = 20.0
    """Seconds that an ordered shutdown takes at most."""
    max_body_bytes: int = 8 << 20
    """Longest request body that is read."""

    @classmethod
    def load(
        cls,
        environment: Mapping[str, str] = os.environ,
        *,
        home: Path | None = None,
        host: str | None = None,
        port: int | None = None,
    ) -> Self:
        """Build from PACKHOUSE_* variables; an argument that is given wins. Raises ``InvalidRequest``."""
        folder = (home or Path(environment.get("PACKHOUSE_HOME") or "~/.packhouse")).expanduser().absolute()
        return cls(
            home=folder,
            store=_store(environment.get("PACKHOUSE_STORE") or str(folder / "store")),
            database_url=environment.get("PACKHOUSE_DATABASE_URL") or f"sqlite:///{folder / 'packhouse.db'}",
            ray_address=environment.get("PACKHOUSE_RAY_ADDRESS") or None,
            cpus=_integer(environment, "PACKHOUSE_CPUS", least=1),
            host=_loopback(host or environment.get("PACKHOUSE_HOST") or DEFAULT_HOST),
            port=_port(port, environment),
        )


def _port(port: int | None, environment: Mapping[str, str]) -> int:
    value = _integer(environment, "PACKHOUSE_PORT", least=0) if port is None else port
    if value is None:
        return DEFAULT_PORT
    if not 0 <= value <= 65535:
        raise InvalidRequest(f"{value} is not a port", "use 0 to 65535")
    return value


def _integer(environment: Mapping[str, str], name: str, *, least: int) -> int | None:
    text = environment.get(name)
    if not text:
        return None
    if not text.isdecimal() or int(text) < least:
        raise InvalidRequest(f"{name} is {text!r}", f"set it to a whole number from {least} on")
    return int(text)


def _store(location: str) -> str:
    if "://" in location:
        raise InvalidRequest(f"the store {location!r} is not a folder", "set PACKHOUSE_STORE to a folder")
    return str(Path(location).expanduser().absolute())


def _loopback(host: str) -> str:
    """Return ``host``, or raise: whoever can reach the service can use it, so only this machine may."""
    try:
        local = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise InvalidRequest(
            f"the service would be open to everyone who can reach {host!r}: there are no access tokens yet",
            "use 127.0.0.1, and an SSH tunnel from other machines",
        )
    return host
