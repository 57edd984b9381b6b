"""The numbers of a dataset's samples, over REST: in source order whichever worker was done first."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer

from packhouse.client.api import Client
from packhouse.client.wire import JobSpec


@pytest.fixture(scope="module")
def texts_of_files() -> list[list[str]]:
    """Texts of four files; the first takes longest, so it is done last."""
    return [
        [f"{name} {i} " + "word " * (i % 50) for i in range(rows)]
        for name, rows in zip("dcba", (3000, 7, 1, 90), strict=True)
    ]


@pytest.fixture(scope="module")
def dataset(service: Any, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory, texts_of_files: Any) -> str:
    folder = tmp_path_factory.mktemp("meta")
    files = [folder / f"{number}-{texts[0][0]}.jsonl" for number, texts in enumerate(texts_of_files)]
    for file, texts in zip(files, texts_of_files, strict=True):
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with Client(service.url) as client:
        spec = JobSpec(sources=[str(file) for file in files], tokenizer=str(tokenizer_dir))
        done = client.wait(client.submit(spec).id).dataset
    assert done is not None
    return done


@pytest.fixture(scope="module")
def expected(tokenizer_dir: Path, texts_of_files: list[list[str]]) -> list[int]:
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    rows = tokenizer.encode_batch([text for texts in texts_of_files for text in texts], add_special_tokens=False)
    return [len(row.ids) + 1 for row in rows]  # each text ends with the end-of-sequence id


def test_the_stream_has_every_samples_tokens_and_cost_in_source_order(
    service: Any, dataset: str, expected: list[int]
) -> None:
    with Client(service.url) as client:
        table = pa.Table.from_batches(list(client.meta(dataset)))
    lengths = np.array(expected, np.int64)
    assert table.column("num_tokens").to_pylist() == expected
    assert table.column("attention_cost").to_pylist() == (lengths * (lengths + 1) // 2).tolist()
    assert table.column("trained_tokens").to_pylist() == expected
    assert table.column("labels").to_pylist() == [n - 1 for n in expected]


def test_the_pages_say_the_same(service: Any, dataset: str, expected: list[int]) -> None:
    following: str | None = f"{service.url}/v1/datasets/{dataset}/meta?limit=1000"
    rows: list[dict[str, int]] = []
    while following:
        answer = httpx.get(following, headers={"accept": "application/json"})
        rows += answer.json()
        following = answer.links.get("next", {}).get("url")
        following = str(httpx.URL(service.url).join(following)) if following else None
    assert [row["num_tokens"] for row in rows] == expected
    assert [row["attention_cost"] for row in rows] == [n * (n + 1) // 2 for n in expected]
