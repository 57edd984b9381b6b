"""Settings of the service: the only file of this portion that reads environment variables."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Self

from packhouse.client.errors import InvalidRequest
from packhouse.client.store import store_at
from packhouse.client.wire_cache import parse_size
from packhouse.service import logs
from packhouse.service.audit import KEEP_DAYS
from packhouse.service.jobs import AT_ONCE
from packhouse.service.keep import Keep
from packhouse.worker.roots import parse

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 7077
DEFAULT_LEASE = 20.0
JOBS_PER_TOKEN = 100


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything the service can be told, built once and passed down."""

    home: Path
    """Folder of the lock, the database and, unless told otherwise, the store."""
    store: str
    """Where shards, manifests and plans lie: a folder, or s3://bucket/prefix."""
    database_url: str
    """SQLAlchemy URL of the job table."""
    ray_address: str | None = None
    """Address of a Ray cluster; None starts a local one."""
    cpus: int | None = None
    """CPUs of the local Ray; None takes all."""
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    """0 picks a free one."""
    lease: float = DEFAULT_LEASE
    """Seconds without a sign of life after which other services take this one's jobs."""
    store_budget: int | None = None
    """Bytes that the store may hold before what was used longest ago is evicted; None evicts nothing by itself."""
    keep: Keep = field(default_factory=Keep)
    """What stays whatever the budget."""
    jobs_at_once: int = AT_ONCE
    """Jobs that run side by side and share the workers; the others wait."""
    jobs_per_token: int = JOBS_PER_TOKEN
    """Jobs of one access token that may wait or run."""
    source_roots: str | None = None
    """Folders and prefixes that requests may read from, with commas between them; None is all. The workers read them
    from their own environment, which the service gives them."""
    tls: tuple[Path, Path] | None = None
    """Certificate and key, in PEM."""
    audit_days: float = KEEP_DAYS
    """Days that entries of the audit log are kept."""
    tokenize_modules: tuple[str, ...] = ()
    """Modules, by their full names, that tokenize functions may be imported from."""
    heartbeat: float = 10.0
    """Seconds without news after which an event stream sends a comment."""
    stop_within: float = 20.0
    """Seconds that an ordered shutdown takes at most."""
    max_body_bytes: int = 8 << 20
    """Longest request body that is read."""
    verify_mb_per_s: float = 0.0
    """Rate at which stored files are read again in the background, in MB/s; 0 reads none."""
    log_format: str = "text"
    """'text' for people, 'json' for collectors."""
    log_level: str = "INFO"
    traces: bool = False
    """Whether an OpenTelemetry collector is named, by OpenTelemetry's own variables, to send traces to."""

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        try:
            return self.host == "localhost" or ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def for_workers(self) -> dict[str, str]:
        """What the workers' processes must find in their environment."""
        return {} if self.source_roots is None else {"PACKHOUSE_SOURCE_ROOTS": self.source_roots}

    def check_open(self, tokens: bool) -> None:
        """Raise ``InvalidRequest`` unless the service may be reached from other machines, or is not.

        ``tokens`` says whether there is a token that a caller could have.
        """
        if self.on_loopback:
            return
        if not tokens:
            raise InvalidRequest(
                f"the service would be open to everyone who can reach {self.host!r}: there is no access token",
                "make one with 'packhouse token create NAME --role admin', and start again",
            )
        if not self.source_roots:
            raise InvalidRequest(
                f"requests to {self.host!r} could read every file that this user can",
                "set PACKHOUSE_SOURCE_ROOTS to the folders and s3:// prefixes that sources and tokenizers lie in",
            )

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
            database_url=_secret(environment, "PACKHOUSE_DATABASE_URL") or f"sqlite:///{folder / 'packhouse.db'}",
            ray_address=environment.get("PACKHOUSE_RAY_ADDRESS") or None,
            cpus=_integer(environment, "PACKHOUSE_CPUS", least=1),
            lease=_number(environment, "PACKHOUSE_LEASE_SECONDS", DEFAULT_LEASE, least=1),
            store_budget=_size(environment, "PACKHOUSE_STORE_BUDGET"),
            keep=Keep(
                recent=3600 * _number(environment, "PACKHOUSE_KEEP_HOURS", Keep().recent / 3600),
                plans=86400 * _number(environment, "PACKHOUSE_KEEP_PLAN_DAYS", Keep().plans / 86400),
            ),
            host=host or environment.get("PACKHOUSE_HOST") or DEFAULT_HOST,
            port=_port(port, environment),
            tokenize_modules=_names(environment, "PACKHOUSE_TOKENIZE_MODULES"),
            jobs_at_once=_integer(environment, "PACKHOUSE_JOBS_AT_ONCE", least=1) or AT_ONCE,
            jobs_per_token=_integer(environment, "PACKHOUSE_JOBS_PER_TOKEN", least=1) or JOBS_PER_TOKEN,
            source_roots=_roots(environment),
            tls=_tls(environment),
            audit_days=_number(environment, "PACKHOUSE_AUDIT_DAYS", KEEP_DAYS),
            verify_mb_per_s=_number(environment, "PACKHOUSE_VERIFY_MB_PER_S", 0),
            log_format=_choice(environment, "PACKHOUSE_LOG_FORMAT", logs.FORMATS, "text"),
            log_level=_choice(environment, "PACKHOUSE_LOG_LEVEL", logs.LEVELS, "INFO"),
            traces=bool(environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")),
        )


def _port(port: int | None, environment: Mapping[str, str]) -> int:
    value = _integer(environment, "PACKHOUSE_PORT", least=0) if port is None else port
    if value is None:
        return DEFAULT_PORT
    if not 0 <= value <= 65535:
        raise InvalidRequest(f"{value} is not a port", "use 0 to 65535")
    return value


def _secret(environment: Mapping[str, str], name: str) -> str | None:
    """Return the value of ``name``, or what stands in the file that ``name``_FILE names: environments are no secret."""
    value, file = environment.get(name), environment.get(f"{name}_FILE")
    if value and file:
        raise InvalidRequest(f"{name} and {name}_FILE are both set", "unset one of them")
    if not file:
        return value
    try:
        return Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{name}_FILE is {file!r}, which cannot be read ({error})", "name a text file") from None


def _integer(environment: Mapping[str, str], name: str, *, least: int) -> int | None:
    text = environment.get(name)
    if not text:
        return None
    if not text.isdecimal() or int(text) < least:
        raise InvalidRequest(f"{name} is {text!r}", f"set it to a whole number from {least} on")
    return int(text)


def _names(environment: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Return the dotted names of a list with commas between them."""
    found = tuple(part.strip() for part in (environment.get(name) or "").split(",") if part.strip())
    for one in found:
        if not all(part.isidentifier() for part in one.split(".")):
            raise InvalidRequest(f"{name} holds {one!r}, which names no module", "write package.module,other")
    return found


def _number(environment: Mapping[str, str], name: str, default: float, least: float = 0) -> float:
    text = environment.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value < math.inf:
        raise InvalidRequest(f"{name} is {text!r}", f"set it to a number from {least:g} on")
    return value


def _size(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    try:
        return parse_size(text) if text else None
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error.detail}", error.remedy) from None


def _choice(environment: Mapping[str, str], name: str, values: tuple[str, ...], default: str) -> str:
    value = environment.get(name) or default
    if value not in values:
        raise InvalidRequest(f"{name} is {value!r}", f"set it to {', '.join(values[:-1])} or {values[-1]}")
    return value


def _store(location: str) -> str:
    if "://" in location:
        store_at(location)  # says what is wrong with it
        return location
    return str(Path(location).expanduser().absolute())


def _roots(environment: Mapping[str, str]) -> str | None:
    text = environment.get("PACKHOUSE_SOURCE_ROOTS")
    if text is not None:
        parse(text)  # says what is wrong with it
    return text


def _tls(environment: Mapping[str, str]) -> tuple[Path, Path] | None:
    names = ("PACKHOUSE_TLS_CERT", "PACKHOUSE_TLS_KEY")
    given = [environment.get(name) for name in names]
    if not any(given):
        return None
    for name, value in zip(names, given, strict=True):
        if not value:
            raise InvalidRequest(f"{name} is missing where the other of {' and '.join(names)} is set", "set both")
        if not Path(value).is_file():
            raise InvalidRequest(f"{name} is {value!r}, which is no file", "name a file in PEM")
    return Path(given[0] or ""), Path(given[1] or "")
