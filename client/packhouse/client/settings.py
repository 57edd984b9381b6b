"""Settings of the client: the only file of this portion that reads environment variables."""

import os
from pathlib import Path

from packhouse.client.wire import DEFAULT_URL


def service_url() -> str:
    """Return where the service is: PACKHOUSE_URL, or the default of ``packhouse serve``."""
    return os.environ.get("PACKHOUSE_URL") or DEFAULT_URL


def cache_folder() -> Path:
    """Return where fetched shards are kept: PACKHOUSE_CACHE, or a folder in the user's cache."""
    given = os.environ.get("PACKHOUSE_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(given).expanduser() if given else Path(home).expanduser() / "packhouse"


def debugging() -> bool:
    """Whether unexpected errors of commands are shown in full: PACKHOUSE_DEBUG."""
    return bool(os.environ.get("PACKHOUSE_DEBUG"))
