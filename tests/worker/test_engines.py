"""Engines: the fast one is used where it is right, found out where it is not, and never wins over the truth."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhouse.worker import engines, tokenize
from packhouse.worker.engines import Encoded, Encoder, GigatokenEngine
from packhouse.worker.probes import probes
from packhouse.worker.recipe import load_tokenizer

TEXTS = [
    "",
    "a",
    "def f(x):\n\treturn x  # ok\n",
    "你好 é 😀 e\u0301",
    " ",
    "\n\n",
    "<|im_start|>user\nhi<|im_end|>",
    "\0\x7f",
]


def backend_of(folder: Path) -> dict[str, Any]:
    return load_tokenizer(str(folder))[0].backend


class Broken:
    """gigatoken with two ids swapped that no probe has: it passes the proof."""

    name = "gigatoken"

    def __init__(self, backend: dict[str, Any], token: str, other: str) -> None:
        vocab = backend["model"]["vocab"]
        self._swap = {vocab[token]: vocab[other], vocab[other]: vocab[token]}
        self._engine = GigatokenEngine(json.dumps(backend))

    def encode(self, texts: Sequence[str]) -> Encoded:
        encoded = self._engine.encode(texts)
        ids = np.array([self._swap.get(int(token), int(token)) for token in encoded.ids], np.uint32)
        return Encoded(ids, encoded.offsets)


@pytest.fixture
def broken(rare: Path) -> Encoder:
    """An encoder whose fast engine is wrong on two words, and passes the probes."""
    backend = backend_of(rare)
    encoder = Encoder(backend)
    assert encoder.name == "gigatoken"
    encoder.fast = Broken(backend, "zq", "qz")
    texts = probes([token["content"] for token in backend["added_tokens"]])
    assert np.array_equal(encoder.fast.encode(texts).ids, encoder.slow.encode(texts).ids)
    assert encoder.fast.encode(["zq"]).ids.tolist() == encoder.slow.encode(["qz"]).ids.tolist() == [266]
    return encoder


def test_the_fast_engine_is_used_and_gives_the_ids_of_tokenizers(tokenizer_dir: Path) -> None:
    encoder = Encoder(backend_of(tokenizer_dir))
    assert (encoder.name, encoder.reason) == ("gigatoken", "")
    for texts in (TEXTS, [], [""], ["", "", "x"]):
        encoded, truth = encoder.encode(texts), encoder.slow.encode(texts)
        assert np.array_equal(encoded.ids, truth.ids)
        assert np.array_equal(encoded.offsets, truth.offsets)
        assert [encoded.ids.dtype.name, encoded.offsets.dtype.name] == ["uint32", "int64"]
    assert encoder.audited > 0


def test_the_probes_find_a_tokenizer_that_gigatoken_gets_wrong(tiny: Path) -> None:
    encoder = Encoder(backend_of(tiny))
    assert (encoder.name, encoder.reason) == ("huggingface", "gigatoken and tokenizers differ on the probes")
    assert encoder.encode(["a  b"]).ids.tolist() == [69, 264, 70]
    assert not encoder.audit_failed
    wrong = GigatokenEngine(json.dumps(backend_of(tiny))).encode(["a  b"]).ids.tolist()
    assert wrong != [69, 264, 70], "if this passes, the tiny tokenizer no longer shows that probes are needed"


def test_probes_hold_every_run_of_white_space_between_every_two_classes() -> None:
    made = set(probes(["<eoa>"]))
    assert {"a  b".replace("b", "Z"), "a\n\n1", "你 é", ".\u3000😀", "x<eoa>y", "<eoa><eoa>\n", "  a", "a\t"} <= made
    assert len(made) > 6_000


@pytest.mark.parametrize(
    ("model", "match"),
    [
        ({"type": "WordLevel", "vocab": {"<unk>": 0, "a": 1}, "unk_token": "<unk>"}, "gigatoken cannot load"),
        ({"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]}, "gigatoken cannot load"),
    ],
)
def test_a_model_that_gigatoken_does_not_know_goes_to_tokenizers(model: dict[str, Any], match: str) -> None:
    backend: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "model": model,
    }
    backend |= {"post_processor": None, "decoder": None, "truncation": None, "padding": None}
    encoder = Encoder(backend)
    assert encoder.name == "huggingface"
    assert encoder.reason.startswith(match)
    assert encoder.encode(["a"]).ids.tolist() == [1]


def test_it_can_be_switched_off(tokenizer_dir: Path) -> None:
    encoder = Encoder(backend_of(tokenizer_dir), fast=False)
    assert (encoder.name, encoder.audited) == ("huggingface", 0)


def test_the_audit_finds_what_the_probes_did_not(broken: Encoder) -> None:
    assert np.array_equal(broken.encode(["fine"]).ids, broken.slow.encode(["fine"]).ids)
    assert broken.fast is not None
    texts = ["x zq", "x qz"]
    assert np.array_equal(broken.encode(texts).ids, broken.slow.encode(texts).ids), (
        "the truth, although it was found late"
    )
    assert (broken.name, broken.audit_failed) == ("huggingface", True)


def test_the_audit_looks_into_long_rows(broken: Encoder) -> None:
    text = " zq" * 2_000
    assert len(text) > engines.AUDIT_CHARACTERS
    assert np.array_equal(broken.encode([text]).ids, broken.slow.encode([text]).ids)
    assert broken.audit_failed


@pytest.mark.parametrize("count", [1, 2, 3, 7, 1_000])
def test_audited_rows_are_spread_and_the_same_for_the_same_texts(count: int) -> None:
    texts = [f"row {index}" for index in range(count)]
    rows = engines._sample(texts)
    assert rows == engines._sample(list(texts))
    assert len(set(rows)) == min(count, engines.AUDIT_ROWS)
    assert all(0 <= row < count for row in rows)
    assert count < 1_000 or rows[0] < count / 2 <= rows[1]


def test_an_engine_found_wrong_in_the_last_batch_has_the_block_done_again(
    rare: Path,
    broken: Encoder,
    toolkit: Any,
    rows: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenize, "BATCH_CHARACTERS", 200)
    # The early batch has the word in the one row of five that the audit passes over, the late one in all.
    early = [f"row {index} " + "filler " * 5 for index in range(5)]
    missed = next(row for row in range(5) if row not in engines._sample(early))
    early[missed] += "x zq"
    assert missed not in engines._sample(early)
    records = [{"text": text} for text in early] + [{"text": "x qz" * 50}]
    kit = toolkit(rare)
    kit.encoder = broken
    assert not np.array_equal(broken.fast.encode(early).ids, broken.slow.encode(early).ids)  # type: ignore[union-attr]
    made = rows(kit, records)
    assert made.ids == rows(toolkit(rare, fast=False), records).ids
    assert (made.samples.engine, made.samples.fallbacks["engine"]) == ("huggingface", 1)
    assert made.samples.records == 6
    assert kit.failed == ("engine",)


def test_a_row_on_the_slow_path_for_masks_is_compared_whole(
    rare: Path, broken: Encoder, toolkit: Any, rows: Any, chat: Any
) -> None:
    kit = toolkit(rare, kind="chat")
    kit.encoder = broken
    kit.encoder.token_bytes = None
    records = [chat("plain", "row")] * 9
    audited = engines._sample(["x"] * 9)
    records[next(row for row in range(9) if row not in audited)] = chat("plain", "x zq")
    made = rows(kit, records)
    truth = rows(toolkit(rare, kind="chat", fast=False), records)
    assert (made.ids, made.masks) == (truth.ids, truth.masks)
    assert kit.failed == ("engine",)


def test_the_engine_is_loaded_anew_when_its_caches_have_grown(
    tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "RECYCLE_BYTES", 10)
    engine = GigatokenEngine(json.dumps(backend_of(tokenizer_dir)))
    first = engine._tokenizer
    ids = engine.encode(["twelve bytes"]).ids.tolist()
    assert engine._tokenizer is first
    assert engine.encode(["twelve bytes"]).ids.tolist() == ids
    assert engine._tokenizer is not first


def test_gigatoken_needs_no_awkward_arrays(monkeypatch: pytest.MonkeyPatch, tokenizer_dir: Path) -> None:
    """Where awkward cannot be imported, gigatoken gives a list of rows in place of one array."""
    engine = GigatokenEngine((tokenizer_dir / "tokenizer.json").read_text())
    texts = ["", "def f(x):\n    return x", "", "héé 😀"]
    whole = engine.encode(texts)
    monkeypatch.setitem(sys.modules, "awkward", None)
    rows = engine.encode(texts)
    assert rows.ids.tolist() == whole.ids.tolist()
    assert rows.offsets.tolist() == whole.offsets.tolist()
