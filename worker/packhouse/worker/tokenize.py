"""A block's bytes, tokenized: parse, render, encode, mark what is trained, add special ids, cut to length.

Everything per token is an array operation; Python runs once a record.
"""

from collections.abc import Iterator

import numpy as np

from packhouse.client.store import ReadStore
from packhouse.worker.by_function import Files, Loaded, by_function
from packhouse.worker.control import ControlTokens, control_tokens
from packhouse.worker.engines import Encoded, Encoder
from packhouse.worker.lengths import TooLong, add_special, cut
from packhouse.worker.masks import by_bytes, by_offsets
from packhouse.worker.reading import Item, Reader
from packhouse.worker.recipe import Recipe, TokenizerContent
from packhouse.worker.render import ChatTemplate
from packhouse.worker.samples import Mask, Samples, join

__all__ = ["Samples", "TooLong", "Toolkit", "tokenize"]

BATCH_CHARACTERS = 4 << 20
"""Characters of text that are encoded at once."""


class Toolkit:
    """What a worker holds to tokenize under one recipe: loading it takes seconds, using it does not."""

    def __init__(
        self, recipe: Recipe, tokenizer: TokenizerContent, *, fast: bool = True, encoder: Encoder | None = None
    ) -> None:
        self.recipe = recipe
        self.vocab_size = tokenizer.vocab_size
        self.function = Loaded.of(recipe, tokenizer)
        """What makes tokens of records in place of all that follows."""
        own = self.function is None
        self.encoder = encoder or Encoder(tokenizer.backend, fast=fast and own)
        self.template: ChatTemplate | None = None
        if recipe.template is not None and own:
            self.template = ChatTemplate(recipe.template, tokenizer.special_tokens, fast=fast, now=recipe.now)
            self.template.prove()
            if recipe.masked:
                self.template.check_mask()
            self.template.control = control_tokens(tokenizer.backend["added_tokens"], self.template.written)
        self.control: ControlTokens = control_tokens(tokenizer.backend["added_tokens"], ())
        """Those of plain texts."""

    @property
    def fast(self) -> bool:
        """Whether the fast engine or the fast renderer is in use."""
        return self.encoder.fast is not None or (self.template is not None and self.template.fast is not None)

    @property
    def failed(self) -> tuple[str, ...]:
        """The parts, 'engine' and 'renderer', whose fast way an audit has found wrong since they were loaded."""
        renderer = self.template is not None and self.template.audit_failed
        return ("engine",) * self.encoder.audit_failed + ("renderer",) * renderer

    @classmethod
    def load(cls, store: ReadStore, recipe: Recipe, *, fast: bool = True) -> "Toolkit":
        """Load the recipe's tokenizer from the store."""
        return cls(recipe, TokenizerContent.load(store, recipe.tokenizer), fast=fast)


def tokenize(data: bytes, toolkit: Toolkit, files: Files | None = None) -> Samples:
    """Tokenize a block. Bad records end up in ``rejects``. Raises ``TooLong`` under overflow 'error'.

    ``files`` are those that its records name, for a function that asks for them.
    """
    if toolkit.function is not None:
        return _finished(by_function(data, toolkit.function, files or {}), toolkit.recipe, data)
    encoder, audited, failed = toolkit.encoder, toolkit.encoder.audited, toolkit.failed
    reader = Reader(toolkit)
    parts = [_encode(batch, toolkit, reader) for batch in _batches(reader.read(data))]
    if toolkit.failed != failed:
        # An audit failed half-way: what the fast way made of the earlier rows cannot be trusted either.
        return tokenize(data, toolkit)
    samples = join(parts, masked=toolkit.recipe.masked)
    samples.records = reader.records
    samples.rejects = reader.rejects
    samples.audited = encoder.audited - audited
    samples.engine = encoder.name
    samples.fallbacks += reader.fallbacks
    if encoder.fast is None:
        samples.fallbacks["engine"] += 1
    if toolkit.template is not None and toolkit.template.fast is None:
        samples.fallbacks["renderer"] += 1
    return _finished(samples, toolkit.recipe, data)


def _finished(samples: Samples, recipe: Recipe, data: bytes) -> Samples:
    samples = cut(add_special(samples, recipe), recipe, data)
    samples.rejects.sort(key=lambda reject: reject.row)
    if recipe.untrained == "drop":
        bad = [reject for reject in samples.rejects if reject.reason != "nothing_to_train"]
        samples.dropped += len(samples.rejects) - len(bad)
        samples.rejects = bad
    return samples


def _batches(texts: Iterator[Item]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text.text) if text.encoded is None else len(text.encoded.ids)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(batch: list[Item], toolkit: Toolkit, reader: Reader) -> Samples:
    rows = np.fromiter((item.line.row for item in batch), np.int32, len(batch))
    texts = [item for item in batch if item.encoded is None]
    encoded = toolkit.encoder.encode([item.text for item in texts]) if texts else Encoded(_NO_IDS, _NO_OFFSETS)
    mask = _mask(texts, encoded, toolkit, reader) if toolkit.recipe.masked else None
    if len(texts) == len(batch):
        return Samples(encoded.ids, encoded.offsets, mask, rows)
    return _merge(batch, encoded, mask, rows)


_NO_IDS, _NO_OFFSETS = np.zeros(0, np.uint32), np.zeros(1, np.int64)


def _merge(batch: list[Item], encoded: Encoded, mask: Mask | None, rows: np.ndarray) -> Samples:
    """Return the samples of a batch in order: some were encoded together, the others came with their ids."""
    ids: list[np.ndarray] = []
    masks: list[Mask] = []
    place = 0
    for item in batch:
        if item.encoded is None:
            part = slice(int(encoded.offsets[place]), int(encoded.offsets[place + 1]))
            place += 1
            ids.append(encoded.ids[part])
            masks += [] if mask is None else [mask[part]]
        else:
            ids.append(item.encoded.ids)
            masks += [] if item.encoded.mask is None else [item.encoded.mask]
    offsets = np.zeros(len(ids) + 1, np.int64)
    np.cumsum([len(row) for row in ids], out=offsets[1:])
    return Samples(np.concatenate(ids), offsets, None if mask is None else np.concatenate(masks), rows)


def _mask(batch: list[Item], encoded: Encoded, toolkit: Toolkit, reader: Reader) -> Mask:
    """Return which tokens overlap a trained span.

    Where ids tell how many bytes they stand for, token borders are a running sum of those; each row's sum is checked
    against its text. A row that fails the check, or whose text the tokenizer alters, goes by the offsets that the
    Hugging Face engine gives.
    """
    tokens = toolkit.encoder.token_bytes
    if tokens is not None:
        texts, spans = [item.text for item in batch], [item.spans or [] for item in batch]
        mask, unsure = by_bytes(texts, spans, encoded.ids, encoded.offsets, tokens)
    else:
        mask, unsure = np.zeros(len(encoded.ids), np.bool_), np.arange(len(batch))
    reader.fallbacks["offsets"] += len(unsure)
    for row in unsure:
        start, stop = int(encoded.offsets[row]), int(encoded.offsets[row + 1])
        ids, offsets = toolkit.encoder.slow.spans(batch[row].text)
        if not np.array_equal(ids, encoded.ids[start:stop]):
            toolkit.encoder.distrust()
            break  # the block is encoded again
        mask[start:stop] = by_offsets(batch[row].spans or [], offsets)
    return mask
