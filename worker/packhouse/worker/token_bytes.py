"""How many bytes of text each id stands for, where ids tell: so that a running sum gives the borders between tokens.

In a byte-level BPE every character of a vocabulary entry stands for one byte. In a SentencePiece BPE entries are text
with ``▁`` for a space, characters outside the vocabulary come as bytes, and some put a space of their own before texts.
"""

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_SPACE = "▁"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """What the ids of a tokenizer tell about the text that they were made of."""

    lengths: np.ndarray[tuple[int], np.dtype[np.int32]]
    """int32, vocabulary: bytes that an id stands for."""
    added: np.ndarray[tuple[int], np.dtype[np.bool_]]
    """bool, vocabulary: whether it is an added token."""
    nfc: bool = False
    """Whether the text is brought to NFC first."""
    pieces: bool = False
    """Whether spaces are written ``▁``, as SentencePiece does."""
    prefix: str = ""
    """Where the tokenizer puts a space of its own: ``first``, before a text that does not begin with one or with an
    added token; ``each``, before all that stands between added tokens; or nowhere."""

    def tell(self, text: str) -> bool:
        """Return whether the ids of ``text`` tell its bytes: it is not changed on its way to them."""
        if self.pieces and _SPACE in text:
            return False
        return not self.nfc or text.isascii() or unicodedata.is_normalized("NFC", text)

    def sizes(self, ids: np.ndarray, offsets: np.ndarray, texts: Sequence[str]) -> np.ndarray:
        """Return the bytes, (tokens,) int32, that each token stands for.

        Text ``i`` is ``ids[offsets[i]:offsets[i + 1]]``. A token that is but a space of its own stands for 0.
        """
        sizes: np.ndarray = self.lengths[ids]
        if not self.prefix:
            return sizes
        behind = np.zeros(len(ids), np.bool_)
        filled = np.diff(offsets) > 0
        if self.prefix == "first":
            filled &= np.array([not text.startswith(" ") for text in texts], np.bool_)
        else:
            behind[1:] = self.added[ids[:-1]]
        behind[offsets[:-1][filled]] = True
        sizes[behind & ~self.added[ids]] -= 1
        return sizes


def token_bytes(backend: dict[str, Any]) -> TokenBytes | None:
    """Return what the ids of a tokenizer tell, or None where they do not tell the bytes."""
    model = backend["model"]
    altered = any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix"))
    altered |= any(token.get("lstrip") or token.get("rstrip") for token in backend["added_tokens"])
    altered |= '"add_prefix_space": true' in json.dumps(backend.get("pre_tokenizer"))
    if model.get("type") != "BPE" or altered:
        return None
    if "ByteLevel" in _kinds(backend.get("pre_tokenizer")):
        normalizer = normalizes(backend)
        if normalizer is None:
            return None
        entries = {index: len(entry) for entry, index in model["vocab"].items()}
        return TokenBytes(*_tables(entries, backend), nfc=normalizer == "NFC")
    prefix = _prefix(backend)
    whole = model.get("byte_fallback") and all(byte in model["vocab"] for byte in _BYTES)
    if prefix is None or not whole or any(token.get("normalized") for token in backend["added_tokens"]):
        return None
    entries = {index: len(entry.replace(_SPACE, " ").encode()) for entry, index in model["vocab"].items()}
    entries |= {model["vocab"][byte]: 1 for byte in _BYTES}
    return TokenBytes(*_tables(entries, backend), pieces=True, prefix=prefix)


def _tables(entries: dict[int, int], backend: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    own = {token["id"]: len(token["content"].encode()) for token in backend["added_tokens"]}
    lengths = np.zeros(1 + max([*entries, *own]), np.int32)
    lengths[list(entries)] = list(entries.values())
    lengths[list(own)] = list(own.values())
    added = np.zeros(len(lengths), np.bool_)
    added[list(own)] = True
    return lengths, added


def _prefix(backend: dict[str, Any]) -> str | None:
    """Return the ``prefix`` of a tokenizer that was made of a SentencePiece model, or None for any other."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = {"type": "Prepend", "prepend": _SPACE}
    before, split = backend.get("normalizer"), backend.get("pre_tokenizer")
    if split is None:
        steps = before["normalizers"] if before and before["type"] == "Sequence" else [before]
        return "" if steps == [replace] else "each" if steps == [prepend, replace] else None
    if before is not None or split.get("type") != "Metaspace" or split.get("replacement") != _SPACE:
        return None
    return {"never": "", "first": "first"}.get(split.get("prepend_scheme", ""))


def normalizes(backend: dict[str, Any]) -> str | None:
    """Return 'none' or 'NFC' for what a tokenizer does to text before it splits it, or None for anything else."""
    kinds = _kinds(backend.get("normalizer")) - {"Sequence"}
    return {frozenset(): "none", frozenset({"NFC"}): "NFC"}.get(frozenset(kinds))


def _kinds(part: Any) -> set[str]:
    """Return the types of a normalizer or pre-tokenizer and of all within it."""
    if isinstance(part, dict):
        own = {part["type"]} if isinstance(part.get("type"), str) else set()
        return own.union(*(_kinds(value) for value in part.values()))
    if isinstance(part, list):
        return set().union(*(_kinds(value) for value in part))
    return set()
