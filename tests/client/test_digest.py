"""Digests: the same for the same content, whatever holds it."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from packhouse.client.digest import canonical_json, digest_bytes, digest_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
).filter(lambda value: _encodable(value))


def _encodable(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


@pytest.mark.parametrize("data", [b"", b"abc", bytes(range(256)) * 9])
def test_bytes_have_one_digest_whatever_holds_them(data: bytes) -> None:
    expected = xxhash.xxh3_128(data).hexdigest()
    array = np.frombuffer(data, np.uint8)
    for holder in (data, bytearray(data), memoryview(data), pa.py_buffer(data), array):
        assert digest_bytes(holder) == expected
    assert len(expected) == 32


def test_known_digests_never_change() -> None:
    """They are addresses of what people have stored."""
    assert digest_bytes(b"packhouse") == xxhash.xxh3_128_hexdigest(b"packhouse")
    assert digest_json({"b": [1, 2.5, None, True], "a": "é"}) == digest_bytes(
        '{"a":"é","b":[1,2.5,null,true]}'.encode()
    )
    assert digest_bytes(b"") == "99aa06d3014798d86001c324468d497f"


@settings(max_examples=50)
@given(VALUES)
def test_canonical_json_is_json_and_stable(value: Any) -> None:
    text = canonical_json(value)
    assert json.loads(text) == value
    assert canonical_json(json.loads(text)) == text


@given(st.dictionaries(st.text(alphabet="abcé", max_size=3), st.integers(), min_size=2))
def test_the_order_of_keys_does_not_count(value: dict[str, int]) -> None:
    assert digest_json(dict(reversed(value.items()))) == digest_json(value)


@pytest.mark.parametrize(("left", "right"), [([1, 2], [2, 1]), (1, "1"), (1, 1.0), ({"a": None}, {}), ("é", "e\u0301")])
def test_what_differs_has_another_digest(left: Any, right: Any) -> None:
    assert digest_json(left) != digest_json(right)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [float("-inf")]])
def test_numbers_that_json_does_not_know_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(value)
