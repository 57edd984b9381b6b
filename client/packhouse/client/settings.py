"""Settings of the client: the only file of this portion that reads environment variables."""

import os
from pathlib import Path

from packhouse.client.errors import InvalidRequest
from packhouse.client.wire import DEFAULT_URL


def service_url() -> str:
    """Return where the service is: PACKHOUSE_URL, or the default of ``packhouse serve``."""
    return os.environ.get("PACKHOUSE_URL") or DEFAULT_URL


def access_token() -> str | None:
    """Return the token that requests carry: PACKHOUSE_TOKEN, or what stands in the file PACKHOUSE_TOKEN_FILE.

    No error shows any of it.
    """
    value, file = os.environ.get("PACKHOUSE_TOKEN"), os.environ.get("PACKHOUSE_TOKEN_FILE")
    if value and file:
        raise InvalidRequest("PACKHOUSE_TOKEN and PACKHOUSE_TOKEN_FILE are both set", "unset one of them")
    try:
        token = Path(file).expanduser().read_text().strip() if file else (value or "").strip()
    except (OSError, UnicodeDecodeError) as error:
        fact = f"PACKHOUSE_TOKEN_FILE is {file!r}, which cannot be read ({error})"
        raise InvalidRequest(fact, "name a text file with the token") from None
    if not token.isprintable() or not token.isascii() or " " in token:
        raise InvalidRequest("the access token has characters that none has", "copy it again")
    return token or None


def ca_file() -> str | None:
    """Return the file with the certificates that are trusted instead of the system's: SSL_CERT_FILE."""
    return os.environ.get("SSL_CERT_FILE") or None


def cache_folder() -> Path:
    """Return where fetched shards are kept: PACKHOUSE_CACHE, or a folder in the user's cache."""
    given = os.environ.get("PACKHOUSE_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(given).expanduser() if given else Path(home).expanduser() / "packhouse"


def cache_budget() -> int:
    """Return how many bytes of fetched shards are kept: PACKHOUSE_CACHE_BYTES, or 100 GB."""
    given = os.environ.get("PACKHOUSE_CACHE_BYTES") or "100000000000"
    if not given.isascii() or not given.isdigit():
        raise InvalidRequest(f"PACKHOUSE_CACHE_BYTES is {given!r}", "set it to a number of bytes")
    return int(given)


def debugging() -> bool:
    """Whether unexpected errors of commands are shown in full: PACKHOUSE_DEBUG."""
    return bool(os.environ.get("PACKHOUSE_DEBUG"))


def faults_file() -> Path | None:
    """Return the file with the faults of a test: PACKHOUSE_FAULTS."""
    given = os.environ.get("PACKHOUSE_FAULTS")
    return Path(given) if given else None
