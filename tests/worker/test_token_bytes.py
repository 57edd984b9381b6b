"""Token bytes: a running sum of them gives the masks that offsets give, or the row is told."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.worker.test_engines import TEXTS, backend_of

from packhouse.worker.engines import Encoder
from packhouse.worker.masks import by_bytes, by_offsets
from packhouse.worker.probes import probes
from packhouse.worker.token_bytes import normalizes, token_bytes

METASPACE = {"type": "Metaspace", "replacement": "▁", "split": False}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
KINDS: dict[str, dict[str, Any]] = {
    "first": {"normalizer": None, "pre_tokenizer": METASPACE | {"prepend_scheme": "first"}},
    "never": {"normalizer": None, "pre_tokenizer": METASPACE | {"prepend_scheme": "never"}},
    "each": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, REPLACE]},
        "pre_tokenizer": None,
    },
    "replaced": {"normalizer": REPLACE, "pre_tokenizer": None},
}
"""What tokenizers that were made of a SentencePiece model do to spaces."""


def sentencepiece(kind: str) -> dict[str, Any]:
    """A small BPE with byte fallback: three added tokens, the bytes, and some pieces with spaces in them."""
    pieces = ["▁", "a", "b", "é", "▁a", "ab", "▁ab", "▁▁", "▁▁▁▁"]
    entries = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    merges = [["▁", "▁"], ["▁▁", "▁▁"], ["▁", "a"], ["a", "b"], ["▁", "ab"], ["▁a", "b"]]
    model = {"type": "BPE", "byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>", "merges": merges}
    return {
        "version": "1.0",
        "added_tokens": [{"id": index, "content": entries[index], **flags} for index in range(3)],
        "post_processor": None,
        "decoder": None,
        "model": model | {"vocab": {entry: index for index, entry in enumerate(entries)}},
        **KINDS[kind],
    }


def masks_of(backend: dict[str, Any], texts: Sequence[str], spans: Sequence[list[tuple[int, int]]]) -> Any:
    """Return the masks by bytes and by offsets, and the texts of which bytes tell nothing."""
    tokens, slow = token_bytes(backend), Encoder(backend, fast=False).slow
    assert tokens is not None
    encoded = slow.encode(texts)
    mask, unsure = by_bytes(texts, spans, encoded.ids, encoded.offsets, tokens)
    truth = [by_offsets(span, slow.spans(text)[1]) for text, span in zip(texts, spans, strict=True)]
    ours = [mask[start:stop] for start, stop in zip(encoded.offsets, encoded.offsets[1:], strict=False)]
    return ours, truth, unsure.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_masks_of_sentencepiece_tokens_are_those_of_their_offsets(kind: str) -> None:
    backend = sentencepiece(kind)
    pieces = st.sampled_from(["a", "ab", " ", "  ", "    ", "\n", "é", "ü", "😀", "<s>", "</s>", "x", "▁"])
    text = st.lists(pieces, max_size=8).map("".join)

    @given(st.lists(st.tuples(text, st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=5))
    def check(rows: list[tuple[str, int, int]]) -> None:
        texts = [text for text, _, _ in rows]
        spans = [[(min(one, other, len(text)), min(max(one, other), len(text)))] for text, one, other in rows]
        ours, truth, unsure = masks_of(backend, texts, spans)
        assert unsure == [row for row, text in enumerate(texts) if "▁" in text]
        for row in set(range(len(texts))) - set(unsure):
            assert ours[row].tolist() == truth[row].tolist(), (texts[row], spans[row])

    check()


def test_a_space_of_the_tokenizers_own_belongs_to_what_follows_it() -> None:
    ours, truth, unsure = masks_of(sentencepiece("each"), ["<s>x", "<s>ab"], [[(3, 4)], [(3, 5)]])
    assert [row.tolist() for row in ours] == [row.tolist() for row in truth] == [[False, True, True], [False, True]]
    assert unsure == []


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFKC"}},
        {"pre_tokenizer": METASPACE | {"prepend_scheme": "always"}},
        {"pre_tokenizer": METASPACE | {"prepend_scheme": "first", "replacement": "_"}},
    ],
)
def test_other_ways_with_spaces_tell_nothing(change: dict[str, Any]) -> None:
    assert token_bytes(sentencepiece("first")) is not None
    assert token_bytes(sentencepiece("first") | change) is None


def test_a_sentencepiece_model_must_have_all_bytes_and_take_added_tokens_as_they_stand() -> None:
    backend = sentencepiece("first")
    few = {entry: index for entry, index in backend["model"]["vocab"].items() if entry != "<0x41>"}
    assert token_bytes(backend | {"model": backend["model"] | {"vocab": few}}) is None
    assert token_bytes(backend | {"model": backend["model"] | {"byte_fallback": False}}) is None
    assert token_bytes(backend | {"added_tokens": [backend["added_tokens"][0] | {"normalized": True}]}) is None


def test_chats_under_mistrals_tokenizer_take_no_slow_way(shared: Path, toolkit: Any, rows: Any) -> None:
    folder = shared / "data" / "tokenizers" / "mistral-spm"
    lines = (shared / "data" / "sft" / "gsm8k_train.jsonl").read_bytes().splitlines(keepends=True)[:200]
    names = {"prompt": "question", "completion": "answer"}
    kit = toolkit(folder, kind="chat", template="llama3", format="completion", fields=names)
    made = rows(kit, b"".join(lines))
    assert len(made.ids) == len(lines)
    assert made.samples.engine == "gigatoken"
    assert made.samples.fallbacks == {}
    kit.encoder.token_bytes = None
    slow = rows(kit, b"".join(lines))
    assert slow.samples.fallbacks == {"offsets": len(lines)}
    assert (made.ids, made.masks) == (slow.ids, slow.masks)


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3", "tiny", "own"])
def test_the_bytes_of_tokens_add_up_to_the_text(
    name: str, request: pytest.FixtureRequest, tiny: Path, tokenizer_dir: Path
) -> None:
    own = {"tiny": tiny, "own": tokenizer_dir}
    folder = own[name] if name in own else request.getfixturevalue("shared") / "data" / "tokenizers" / name
    backend = backend_of(folder)
    tokens, slow = token_bytes(backend), Encoder(backend, fast=False).slow
    assert tokens is not None
    texts = [text for text in [*TEXTS, *probes([])[:60]] if "\u0301" not in text]
    for text in texts:
        if normalizes(backend) != "NFC" or text.isascii():
            assert int(tokens.lengths[slow.encode([text]).ids].sum()) == len(text.encode()), text


def test_where_ids_do_not_tell_their_bytes_there_are_none(tiny_files: dict[str, Any]) -> None:
    backend = tiny_files["tokenizer.json"]
    assert token_bytes(backend) is not None
    spaced = backend | {"pre_tokenizer": backend["pre_tokenizer"] | {"add_prefix_space": True}}
    assert token_bytes(spaced) is None
    for flag in ("lstrip", "rstrip"):
        tokens = [backend["added_tokens"][0] | {flag: True}, *backend["added_tokens"][1:]]
        assert token_bytes(backend | {"added_tokens": tokens}) is None
    assert token_bytes(backend | {"pre_tokenizer": {"type": "Metaspace"}}) is None
    assert token_bytes(backend | {"model": backend["model"] | {"end_of_word_suffix": "</w>"}}) is None


def test_spaces_that_are_added_and_spaces_that_are_taken_do_not_cancel_out(
    tiny_files: dict[str, Any], write_tokenizer: Any, toolkit: Any, rows: Any, tmp_path: Path
) -> None:
    """Together they leave the sum of bytes right and the borders between them wrong by one."""
    backend = json.loads(json.dumps(tiny_files["tokenizer.json"]))
    backend["pre_tokenizer"]["add_prefix_space"] = True
    backend["added_tokens"][4]["lstrip"] = True
    folder = write_tokenizer(tmp_path / "t", tiny_files | {"tokenizer.json": backend})
    template = "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"
    record = {"messages": [{"role": "user", "content": "q "}, {"role": "assistant", "content": "xyz "}]}
    kit = toolkit(folder, kind="chat", template=template)
    assert rows(kit, [record]).trained == [[92, 93, 94, 4]]
    kit.encoder.token_bytes = token_bytes(tiny_files["tokenizer.json"])
    assert rows(kit, [record]).trained != [[92, 93, 94, 4]], "by their bytes they would be"


def test_normalizers_are_told_apart() -> None:
    assert normalizes({"normalizer": None}) == "none"
    assert normalizes({"normalizer": {"type": "Sequence", "normalizers": []}}) == "none"
    assert normalizes({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}}) == "NFC"
    assert (
        normalizes({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}})
        is None
    )
    assert normalizes({"normalizer": {"type": "NFKC"}}) is None
