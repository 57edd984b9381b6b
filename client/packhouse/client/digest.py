"""Content digests: xxh3-128 of bytes and of canonical JSON, as 32 hexadecimal digits; and JSON that carries its own."""

import json
import re
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


_SEAL = re.compile(rb',"seal":"([0-9a-f]{32})"\}')
_SEAL_BYTES = len(b',"seal":""}') + 32


def sealed(body: dict[str, Any]) -> bytes:
    """Return the canonical JSON of ``body`` with one more field at its end, ``seal``: the digest of the rest."""
    text = canonical_json(body)
    return b'%s,"seal":"%s"}' % (text[:-1], digest_bytes(text).encode())


def unsealed(data: bytes) -> dict[str, Any]:
    """Return what was sealed; raise ``ValueError`` where the seal does not fit.

    JSON without a seal is returned as it is: it was written before there were any. Whoever reads it refuses fields that
    it does not know, so that a damaged seal is not taken for none.
    """
    body = data
    if match := _SEAL.fullmatch(data[-_SEAL_BYTES:]):
        body = data[:-_SEAL_BYTES] + b"}"
        if digest_bytes(body) != match[1].decode():
            raise ValueError("its seal does not fit")
    value = json.loads(body)
    if not isinstance(value, dict):
        raise ValueError("it is no object")
    return value
