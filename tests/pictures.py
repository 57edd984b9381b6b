"""What the tests of pictures share: a tokenizer that has tokens for them, pictures, and records that name them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from packhouse.client.wire import JobSpec
from packhouse.worker.by_function import names_in
from packhouse.worker.files import at_once
from packhouse.worker.recipe import resolve
from packhouse.worker.tokenize import Samples, Toolkit, tokenize

SIZES = {"a.png": (60, 40), "b.png": (112, 56), "wide.jpg": (90, 28)}
SETTINGS = {"patch_size": 14, "merge_size": 2, "min_pixels": 784, "max_pixels": 784 * 12}
TOKENS = {"a.png": 2, "b.png": 8, "wide.jpg": 3}
"""Sides of 28 pixels a token: 2 × 1, 4 × 2 and 3 × 1."""

PAD, START, END = 265, 266, 267


@pytest.fixture(scope="session")
def seeing(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_files: dict[str, Any],
    write_tokenizer: Callable[[Path, dict[str, Any]], Path],
) -> Path:
    """The folder of the tiny tokenizer with three more tokens: the image pad 265, its start 266 and its end 267."""
    files = json.loads(json.dumps(tiny_files))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    names = {PAD: "<|image_pad|>", START: "<|vision_start|>", END: "<|vision_end|>"}
    files["tokenizer.json"]["added_tokens"] += [{"id": id_, "content": name, **flags} for id_, name in names.items()]
    return write_tokenizer(tmp_path_factory.mktemp("seeing"), files)


def write_pictures(folder: Path) -> Path:
    """Write the pictures of ``SIZES``, each of other colours, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, (width, height)) in enumerate(SIZES.items()):
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(folder / name)
    return folder


@pytest.fixture
def album(tmp_path: Path) -> Path:
    """A folder with pictures."""
    return write_pictures(tmp_path / "album")


def asked(*pictures: str, text: str = "", answer: str = "yes") -> dict[str, Any]:
    """Return a record that asks about pictures."""
    question = "<image>" * len(pictures) + text
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": list(pictures)}


@pytest.fixture
def see(seeing: Path, memory_store: type[Any]) -> Callable[..., Samples]:
    """Return a function (records, folder, roots, **options) -> samples of the vision recipe."""

    def make(records: list[Any], folder: Path, roots: dict[str, str] | None = None, **options: Any) -> Samples:
        store = memory_store()
        given = {"processor": SETTINGS, **options}
        spec = JobSpec(sources=["/none"], tokenizer=str(seeing), tokenize="vision", tokenize_options=given)
        toolkit = Toolkit.load(store, resolve(spec, store).recipe_)
        assert toolkit.function is not None
        data = b"".join(json.dumps(record).encode() + b"\n" for record in records)
        files = at_once(names_in(data, toolkit.function), str(folder / "rows.jsonl"), roots or {})
        return tokenize(data, toolkit, files)

    return make
