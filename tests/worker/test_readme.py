"""The README's records: each line of input is of the form that it stands for, and goes in by its command."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from packhouse.client.wire import JobSpec
from packhouse.worker.forms import NEEDED
from packhouse.worker.recipe import resolve
from packhouse.worker.tokenize import Toolkit

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
ROW = r"^\| (\w+) \| `(\{.*?\})`.*? \| `packhouse submit (\S+) --tokenizer T ?(.*?)` \|$"
ROWS = re.findall(ROW, README, re.MULTILINE)


def test_every_form_has_a_row() -> None:
    assert sorted(form for form, *_ in ROWS) == sorted(NEEDED)


@pytest.mark.parametrize(("form", "line", "file", "options"), ROWS)
def test_a_line_goes_in_by_its_command(
    form: str, line: str, file: str, options: str, tiny: Path, memory_store: type[Any], rows: Any
) -> None:
    words = shlex.split(options)
    fields: dict[str, Any] = {"fields": {}}
    for name, value in zip(words[::2], words[1::2], strict=True):
        if name == "--field":
            fields["fields"] |= [value.split("=")]
        else:
            fields[name.removeprefix("--")] = value
    store, records = memory_store(), [json.loads(line)]
    recipe = resolve(JobSpec(sources=[f"/{file}"], tokenizer=str(tiny), **fields), store, records).recipe_
    assert recipe.record == form
    made = rows(Toolkit.load(store, recipe, fast=False), records)
    assert (len(made.ids), made.rejects) == (1, [])
    assert made.masks is None or any(made.masks[0])
