"""Content digests: xxh3-128 of bytes and of canonical JSON, as 32 hexadecimal digits."""

import json
from typing import Any

import xxhash


def digest_bytes(data: Any) -> str:
    """Return the xxh3-128 of ``data``: any object with the buffer protocol, never copied."""
    return xxhash.xxh3_128_hexdigest(data)


def canonical_json(value: Any) -> bytes:
    """Return the one JSON text of ``value``: sorted keys, no white space, UTF-8, no NaN or infinity."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def digest_json(value: Any) -> str:
    """Return the xxh3-128 of the canonical JSON of ``value``."""
    return digest_bytes(canonical_json(value))
