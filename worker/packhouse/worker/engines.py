"""Encoding engines: from texts to ids, fast behind proof, and always those of the Hugging Face tokenizer.

gigatoken (Rust) encodes an order of magnitude faster than ``tokenizers``. It is used only after a probe set has come
out equal, and while it is in use a sample of every block is encoded by both. One difference, and the Hugging Face
engine takes over.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tokenizers
import xxhash

from packhouse.worker.probes import probes
from packhouse.worker.token_bytes import token_bytes

Ids = np.ndarray[tuple[int], np.dtype[np.uint32]]
Offsets = np.ndarray[tuple[int], np.dtype[np.int64]]

RECYCLE_BYTES = 768 << 20
"""Text after which the fast engine is loaded anew, because its caches grow with every distinct word."""
AUDIT_ROWS = 2
"""Rows that both engines encode, of each batch that a block is encoded in."""
AUDIT_CHARACTERS = 1024
"""Of a longer row, so many characters are compared."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Ids of several texts, flat: text ``i`` is ``ids[offsets[i]:offsets[i + 1]]``."""

    ids: Ids
    offsets: Offsets


class Engine(Protocol):
    """Turns texts into ids, special tokens in the text recognised, none added."""

    name: str

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Encode ``texts``."""


class HuggingFaceEngine:
    """The ``tokenizers`` library: the truth, and the way out."""

    name = "huggingface"

    def __init__(self, backend: str | tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(backend) if isinstance(backend, str) else backend
        # The same tokenizer without added tokens. It shares the model: to load another one would take a second.
        self._plain = tokenizers.Tokenizer(self._tokenizer.model)
        if self._tokenizer.normalizer is not None:
            self._plain.normalizer = self._tokenizer.normalizer
        if self._tokenizer.pre_tokenizer is not None:
            self._plain.pre_tokenizer = self._tokenizer.pre_tokenizer

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Encode ``texts``."""
        rows = [item.ids for item in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        ids = np.fromiter(itertools.chain.from_iterable(rows), np.uint32, int(offsets[-1]))
        return Encoded(ids, offsets)

    def spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of one text and, for each, the characters it stands for."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def plain_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Do the same as if the tokenizer had no added tokens."""
        encoding = self._plain.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def id_of(self, token: str) -> int | None:
        """Return a token's id."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found


class GigatokenEngine:
    """gigatoken on the calling thread; raises ``RuntimeError`` or ``ValueError`` for a tokenizer it cannot load."""

    name = "gigatoken"

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._load()

    def _load(self) -> None:
        import gigatoken

        self._tokenizer = gigatoken.Tokenizer.from_json(self._backend)
        self._bytes = 0

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Encode ``texts``."""
        if self._bytes > RECYCLE_BYTES:
            self._load()
        self._bytes += sum(map(len, texts))
        made = self._tokenizer.encode_batch(list(texts), parallel=False)
        if isinstance(made, list):  # where awkward cannot be imported, say because a cancel cut its import off
            return _flat(made)
        offsets = np.asarray(made.layout.offsets.data, np.int64)
        ids = np.asarray(made.layout.content.data)[offsets[0] : offsets[-1]]
        return Encoded(ids, offsets - offsets[0])


def _flat(rows: Sequence[Any]) -> Encoded:
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    arrays = [np.zeros(0, np.uint32), *(np.asarray(row, np.uint32) for row in rows)]
    return Encoded(np.concatenate(arrays), offsets)


class Encoder:
    """Encodes by the fast engine while it is proven and by the Hugging Face one else; counts what it does."""

    def __init__(self, backend: dict[str, Any], *, fast: bool = True) -> None:
        text = json.dumps(backend)
        self.slow = HuggingFaceEngine(text)
        self.fast: Engine | None = None
        self.reason = "" if fast else "switched off for this recipe"
        """Why the fast engine is not in use."""
        self.token_bytes = token_bytes(backend)
        self.audited = 0
        self.audit_failed = False
        if fast:
            self._prove(text, backend)

    @property
    def name(self) -> str:
        """Name of the engine in use."""
        return (self.fast or self.slow).name

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Encode ``texts``; some of them by both engines when the fast one is in use."""
        if self.fast is None:
            return self.slow.encode(texts)
        encoded = self.fast.encode(texts)
        if self._audit(texts, encoded):
            return encoded
        self.distrust()
        return self.slow.encode(texts)

    def distrust(self) -> None:
        """A row came out wrong: use the Hugging Face engine from now on."""
        self.fast = None
        self.reason = "gigatoken and tokenizers differed on a row"
        self.audit_failed = True

    def _prove(self, text: str, backend: dict[str, Any]) -> None:
        try:
            self.fast = GigatokenEngine(text)
        except Exception as error:  # its loader raises bare exceptions for models it does not know
            self.reason = f"gigatoken cannot load this tokenizer ({str(error).partition(chr(10))[0][:200]})"
            return
        texts = probes([token["content"] for token in backend["added_tokens"]])
        if not _equal(self.fast.encode(texts), self.slow.encode(texts)):
            self.fast = None
            self.reason = "gigatoken and tokenizers differ on the probes"

    def _audit(self, texts: Sequence[str], encoded: Encoded) -> bool:
        assert self.fast is not None
        rows = _sample(texts)
        self.audited += len(rows)
        short = [row for row in rows if len(texts[row]) <= AUDIT_CHARACTERS]
        truth = self.slow.encode([texts[row] for row in short])
        for index, row in enumerate(short):
            ours = encoded.ids[encoded.offsets[row] : encoded.offsets[row + 1]]
            if not np.array_equal(ours, truth.ids[truth.offsets[index] : truth.offsets[index + 1]]):
                return False
        parts = [_excerpt(texts[row]) for row in rows if len(texts[row]) > AUDIT_CHARACTERS]
        return not parts or _equal(self.fast.encode(parts), self.slow.encode(parts))


def _equal(left: Encoded, right: Encoded) -> bool:
    return np.array_equal(left.offsets, right.offsets) and np.array_equal(left.ids, right.ids)


def _sample(texts: Sequence[str]) -> list[int]:
    """Return the rows to audit: the same for the same texts, and spread over all of them."""
    if len(texts) <= AUDIT_ROWS:
        return list(range(len(texts)))
    seed = xxhash.xxh3_64_intdigest(texts[0].encode("utf-8", "replace")) ^ len(texts)
    stride = len(texts) / AUDIT_ROWS
    return [int(index * stride) + (seed >> (index * 5)) % max(int(stride), 1) for index in range(AUDIT_ROWS)]


def _excerpt(text: str) -> str:
    start = xxhash.xxh3_64_intdigest(text[:256].encode("utf-8", "replace")) % (len(text) - AUDIT_CHARACTERS + 1)
    return text[start : start + AUDIT_CHARACTERS]
