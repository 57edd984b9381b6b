"""What the tests of the service share."""

import json
from pathlib import Path

import pytest
from tests.service.house import house  # noqa: F401 - a fixture


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some seconds of work for one worker: blocks of 16 MB and more."""
    file = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    words = [f"word{n * 7919 % 100_003}" for n in range(120)]
    with open(file, "w") as out:
        for number in range(70_000):
            at = number % 60
            out.write(json.dumps({"text": f"{number} " + " ".join(words[at : at + 60])}) + "\n")
    return file
