"""The service's log: lines for people, or JSON for collectors; each names the job and the request it belongs to."""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType

FORMATS = ("text", "json")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

_BOUND: ContextVar[Mapping[str, str]] = ContextVar("packhouse_log", default=MappingProxyType({}))


@contextmanager
def bound(**names: str) -> Iterator[None]:
    """Put ``names``, as in ``job="d09b…"``, on every line that is logged in this context."""
    token = _BOUND.set({**_BOUND.get(), **names})
    try:
        yield
    finally:
        _BOUND.reset(token)


def bound_to(name: str) -> str | None:
    """Return what is bound under ``name`` here."""
    return _BOUND.get().get(name)


def set_up(style: str = "text", level: str = "INFO") -> None:
    """Send the log of this process to standard error, in one of ``FORMATS``; warnings of libraries go there too."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if style == "json" else TextLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
    # One line for every request that the program itself sends.
    logging.getLogger("httpx").setLevel(logging.WARNING)


class TextLines(logging.Formatter):
    """Time, level, logger, what is bound, message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(bound)s%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; an exception follows on lines of its own."""
        record.bound = "".join(f"[{name} {value}] " for name, value in _BOUND.get().items())
        return super().format(record)


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, what is bound, and the exception, if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_BOUND.get(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
