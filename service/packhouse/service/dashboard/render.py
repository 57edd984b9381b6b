"""Pages from templates: everything is escaped, and nothing comes from anywhere but this service."""

import time
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from packhouse.client.charts import short
from packhouse.client.digest import digest_bytes
from packhouse.client.errors import PackhouseError
from packhouse.client.wire_cache import show_size
from packhouse.service import problems
from packhouse.service.dashboard import pictures
from packhouse.service.dashboard.history import recipe_title_of, title_of

HERE = Path(__file__).parent
HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
}
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def page(template: str, status: int = 200, **context: Any) -> HTMLResponse:
    """Return the page that a template makes."""
    return HTMLResponse(fragment(template, **context), status, HEADERS)


def error_page(error: PackhouseError) -> HTMLResponse:
    """Return the page that tells of an error."""
    return page("error.html", error.status, error=error, title=problems.describe(error).title)


def fragment(template: str, **context: Any) -> str:
    """Return the HTML that a template makes."""
    return _templates().get_template(template).render(now=time.time(), **context)


@cache
def static_files() -> dict[str, tuple[pa.Buffer, str, str]]:
    """Return style sheet, script and icon: name → bytes, digest, media type."""
    found = {}
    for path in sorted((HERE / "static").iterdir()):
        if path.suffix in _TYPES:
            data = path.read_bytes()
            found[path.name] = (pa.py_buffer(data), digest_bytes(data), _TYPES[path.suffix])
    return found


@cache
def _templates() -> Environment:
    loader = FileSystemLoader(HERE / "templates")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {"number": _number, "big": _big, "size": show_size, "share": _share, "ago": _ago, "utc": _utc}
    made.filters |= {"seconds": _seconds, "title_of": title_of, "recipe_title_of": recipe_title_of, "json": _json}
    made.globals |= {"version": version("packhouse"), "share_bar": pictures.bars, "colours": pictures.COLOURS}
    return made


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def _big(value: int) -> Markup:
    """Return a number that fits a card: long ones in three digits, whole when they are pointed at."""
    text = short(value) if value >= 10_000_000 else _number(value)
    return Markup('<span title="{}">{}</span>').format(_number(value), text)


def _share(value: float, digits: int = 1) -> str:
    return f"{value:.{digits}%}"


def _utc(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def _ago(then: datetime, now: float) -> str:
    passed = max(0, round(now - then.timestamp()))
    return "just now" if passed < 5 else f"{_seconds(passed)} ago"


def _seconds(seconds: float) -> str:
    """Return a stretch of time, in the largest unit that leaves a whole number above one."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.3g} s"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _json(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_json(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_json, value))
    return {None: "–", True: "yes", False: "no"}[value] if value is None or isinstance(value, bool) else str(value)
