"""The command line's options for tokenize functions."""

import os
from pathlib import Path
from typing import Any

import pytest

from packhouse.client.errors import InvalidRequest
from packhouse.client.function_options import function_fields


def test_options_are_json_words_or_files(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('{"patch_size": 14}')
    given = ["loss=last_turn", "decode=true", "count=3", 'text="a=b"', f"processor=@{tmp_path}/p.json", "none=null"]
    assert function_fields("vision", given, None)["tokenize_options"] == {
        "loss": "last_turn",
        "decode": True,
        "count": 3,
        "text": "a=b",
        "processor": {"patch_size": 14},
        "none": None,
    }


def test_roots_are_absolute_and_may_have_a_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "a=b"
    odd.mkdir()
    monkeypatch.chdir(tmp_path)
    roots = function_fields("vision", None, ["x/=pictures", "a=b"])["file_roots"]
    assert roots == {"x/": os.path.join(tmp_path, "pictures"), "": str(odd)}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((None, ["a=1"], None), "belong to a tokenize function"),
        ((None, None, ["/x"]), "belong to a tokenize function"),
        (("vision", ["a"], None), "'a' is not a pair"),
        (("vision", ["=1"], None), "not a pair"),
        (("vision", ["a={"], None), "'a' is not JSON"),
        (("vision", ["a=@/no/such"], None), "cannot be read"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: Any, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        function_fields(*arguments)
