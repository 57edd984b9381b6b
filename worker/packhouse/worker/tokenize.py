"""A block's bytes, tokenized: parse, render, encode, mark what is trained, add special ids, cut to length.

Everything per token is an array operation; Python runs once a record.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from packhouse.client.errors import InvalidRequest
from packhouse.client.store import ReadStore
from packhouse.worker.engines import Encoded, Encoder, normalizes
from packhouse.worker.recipe import Recipe, TokenizerContent
from packhouse.worker.records import BadRecord, Chat, Line, Reject, chat_of, lines, parse, text_of
from packhouse.worker.render import ChatTemplate, Span, TemplateError

BATCH_CHARACTERS = 4 << 20
"""Characters of text that are encoded at once."""
AUDIT_CHATS = 4
"""Chats of a block that both renderers render: so many plain ones, and so many with tools or other extras."""

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


class TooLong(InvalidRequest):
    """A sample longer than max_length, under overflow 'error'."""

    kind = "too-long"

    row: int = -1
    """Line of the record in its block, from 0."""


@dataclass(slots=True)
class Samples:
    """The samples of a block; sample ``i`` is ``ids[offsets[i]:offsets[i + 1]]``."""

    ids: np.ndarray[tuple[int], np.dtype[np.uint32]]
    """uint32, tokens."""
    offsets: np.ndarray[tuple[int], np.dtype[np.int64]]
    """int64, samples + 1."""
    mask: Mask | None
    """bool, tokens; None when every token is trained."""
    rows: np.ndarray[tuple[int], np.dtype[np.int32]]
    """int32, samples: line of each in its block, from 0."""
    records: int = 0
    rejects: list[Reject] = field(default_factory=list)
    dropped: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Slower paths taken: 'engine' and 'renderer' by block, 'offsets' by row."""
    audited: int = 0
    engine: str = ""


class Toolkit:
    """What a worker holds to tokenize under one recipe: loading it takes seconds, using it does not."""

    def __init__(self, recipe: Recipe, tokenizer: TokenizerContent, *, fast: bool = True) -> None:
        self.recipe = recipe
        self.vocab_size = tokenizer.vocab_size
        self.encoder = Encoder(tokenizer.backend, fast=fast)
        self.normalization = normalizes(tokenizer.backend)
        self.template: ChatTemplate | None = None
        if recipe.template is not None:
            self.template = ChatTemplate(recipe.template, tokenizer.special_tokens, fast=fast)
            self.template.prove()
            if recipe.masked and not self.template.generation:
                _ = self.template.markers  # raises where the template has none

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


def tokenize(data: bytes, toolkit: Toolkit) -> Samples:
    """Tokenize a block. Bad records end up in ``rejects``. Raises ``TooLong`` under overflow 'error'."""
    encoder, audited, failed = toolkit.encoder, toolkit.encoder.audited, toolkit.failed
    reader = _Reader(toolkit)
    parts = [_encode(batch, toolkit, reader) for batch in _batches(reader.read(data))]
    if toolkit.failed != failed:
        # An audit failed half-way: what the fast way made of the earlier rows cannot be trusted either.
        return tokenize(data, toolkit)
    samples = _join(parts, toolkit.recipe)
    samples.records = reader.records
    samples.rejects = reader.rejects
    samples.audited = encoder.audited - audited
    samples.engine = encoder.name
    samples.fallbacks += reader.fallbacks
    if encoder.fast is None:
        samples.fallbacks["engine"] += 1
    if toolkit.template is not None and toolkit.template.fast is None:
        samples.fallbacks["renderer"] += 1
    samples = _cut(_add_special(samples, toolkit.recipe), toolkit.recipe, data)
    samples.rejects.sort(key=lambda reject: reject.row)
    return samples


@dataclass(frozen=True, slots=True)
class _Text:
    line: Line
    text: str
    spans: list[Span] | None
    """Trained characters; None when all are."""


class _Reader:
    """Reads a block's records to texts, and keeps what it cannot use."""

    def __init__(self, toolkit: Toolkit) -> None:
        self._toolkit = toolkit
        self.records = 0
        self.rejects: list[Reject] = []
        self.fallbacks: Counter[str] = Counter()
        self._audited: Counter[bool] = Counter()

    def read(self, data: bytes) -> Iterator[_Text]:
        """Yield the usable records of a block as texts."""
        read = self._chat if self._toolkit.template is not None else self._plain
        for line in lines(data):
            self.records += 1
            try:
                text = read(line)
            except BadRecord as error:
                self.rejects.append(line.reject(error))
            except RecursionError:
                self.rejects.append(line.reject(BadRecord("unsupported", "values are nested too deeply")))
            else:
                yield text

    def _plain(self, line: Line) -> _Text:
        return _Text(line, text_of(parse(line.data), self._toolkit.recipe.field), None)

    def _chat(self, line: Line) -> _Text:
        template = self._toolkit.template
        assert template is not None
        chat = chat_of(parse(line.data), self._toolkit.recipe.field)
        extras = chat.tools is not None or any(len(message) > 2 for message in chat.messages)
        if self._audited[extras] < AUDIT_CHATS:
            self._audited[extras] += 1
            template.audit(chat)
        try:
            text, generated = template.render(chat)
        except TemplateError as error:
            raise BadRecord("template", error.discreet(template.source)) from None
        return _Text(line, text, self._spans(template, chat, text, generated))

    def _spans(self, template: ChatTemplate, chat: Chat, text: str, generated: list[Span]) -> list[Span] | None:
        if not self._toolkit.recipe.masked:
            return None
        spans = template.spans(chat, text, generated)
        if not any(end > start for start, end in spans):
            raise BadRecord("nothing_to_train", "no assistant message to be trained")
        return spans


def _batches(texts: Iterator[_Text]) -> Iterator[list[_Text]]:
    batch: list[_Text] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(batch: list[_Text], toolkit: Toolkit, reader: _Reader) -> Samples:
    encoded = toolkit.encoder.encode([item.text for item in batch])
    rows = np.fromiter((item.line.row for item in batch), np.int32, len(batch))
    mask = _mask(batch, encoded, toolkit, reader) if toolkit.recipe.masked else None
    return Samples(encoded.ids, encoded.offsets, mask, rows)


def _mask(batch: list[_Text], encoded: Encoded, toolkit: Toolkit, reader: _Reader) -> Mask:
    """Return which tokens overlap a trained span.

    Where ids tell how many bytes they stand for, token borders are a running sum of those; each row's sum is checked
    against its text. A row that fails the check, or whose text the tokenizer alters, goes by the offsets that the
    Hugging Face engine gives.
    """
    mask = np.zeros(len(encoded.ids), np.bool_)
    lengths = toolkit.encoder.token_bytes
    ends = np.cumsum(lengths[encoded.ids], dtype=np.int64) if lengths is not None else None
    for index, item in enumerate(batch):
        start, stop = int(encoded.offsets[index]), int(encoded.offsets[index + 1])
        row = mask[start:stop]
        spans = item.spans or []
        if ends is not None and toolkit.normalization is not None:
            base = int(ends[start - 1]) if start else 0
            borders = ends[start:stop]
            if _by_bytes(item.text, spans, borders, base, row, nfc=toolkit.normalization == "NFC"):
                continue
        reader.fallbacks["offsets"] += 1
        ids, offsets = toolkit.encoder.slow.spans(item.text)
        if not np.array_equal(ids, encoded.ids[start:stop]):
            toolkit.encoder.distrust()
            return mask  # the block is encoded again
        row[:] = _by_offsets(spans, offsets)
    return mask


def _by_bytes(text: str, spans: Sequence[Span], ends: np.ndarray, base: int, row: Mask, *, nfc: bool) -> bool:
    """Mark ``row`` by the tokens' byte lengths; return False if those do not add up to ``text``."""
    ascii_only = text.isascii()
    if nfc and not ascii_only and not unicodedata.is_normalized("NFC", text):
        return False
    size = len(text) if ascii_only else len(text.encode())
    if size != (int(ends[-1]) - base if len(ends) else 0):
        return False
    done = place = 0  # characters and bytes up to the last border
    for span in spans:
        borders = []
        for border in span:
            place += border - done if ascii_only else len(text[done:border].encode())
            done = border
            borders.append(base + place)
        # A token overlaps [start, end) when it ends behind start and begins before end.
        first, last = np.searchsorted(ends, borders[0], "right"), np.searchsorted(ends, borders[1], "left")
        if span[1] > span[0]:
            row[first : last + 1] = True
    return True


def _by_offsets(spans: Sequence[Span], offsets: Sequence[Span]) -> Mask:
    """Return which of the tokens that stand for the characters ``offsets`` overlap a span."""
    places = np.asarray(offsets, np.int64).reshape(-1, 2)
    mask = np.zeros(len(places), np.bool_)
    for begin, stop in spans:
        mask |= (places[:, 0] < stop) & (places[:, 1] > begin)
    return mask


def _join(parts: Sequence[Samples], recipe: Recipe) -> Samples:
    if len(parts) == 1:
        return parts[0]
    counts = [np.diff(part.offsets) for part in parts]
    offsets = np.zeros(1 + sum(map(len, counts)), np.int64)
    np.cumsum(np.concatenate([np.zeros(0, np.int64), *counts]), out=offsets[1:])
    ids = np.concatenate([np.zeros(0, np.uint32), *(part.ids for part in parts)])
    rows = np.concatenate([np.zeros(0, np.int32), *(part.rows for part in parts)])
    masks = [part.mask for part in parts if part.mask is not None]
    mask = np.concatenate([np.zeros(0, np.bool_), *masks]) if recipe.masked else None
    return Samples(ids, offsets, mask, rows)


def _add_special(samples: Samples, recipe: Recipe) -> Samples:
    """Put the bos id before and the eos id behind each sample, where it does not stand already."""
    if recipe.bos_id is None and recipe.eos_id is None:
        return samples
    starts, stops = samples.offsets[:-1], samples.offsets[1:]
    filled = stops > starts
    before = np.full(len(starts), recipe.bos_id is not None)
    behind = np.full(len(starts), recipe.eos_id is not None)
    if len(samples.ids):
        last = len(samples.ids) - 1
        before &= ~(filled & (samples.ids[np.minimum(starts, last)] == recipe.bos_id))
        behind &= ~(filled & (samples.ids[np.maximum(stops - 1, 0)] == recipe.eos_id))
    counts = stops - starts + before + behind
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    bodies = np.ones(offsets[-1], np.bool_)
    bodies[offsets[:-1][before]] = False
    bodies[offsets[1:][behind] - 1] = False
    ids = np.empty(offsets[-1], np.uint32)
    ids[bodies] = samples.ids
    if recipe.bos_id is not None:
        ids[offsets[:-1][before]] = recipe.bos_id
    if recipe.eos_id is not None:
        ids[offsets[1:][behind] - 1] = recipe.eos_id
    if samples.mask is not None:
        mask = np.zeros(offsets[-1], np.bool_)
        mask[bodies] = samples.mask
        # An end of sequence is trained where what it ends is.
        ends = offsets[1:][behind & filled] - 1
        mask[ends] = mask[ends - 1]
        samples.mask = mask
    samples.ids, samples.offsets = ids, offsets
    return samples


def _cut(samples: Samples, recipe: Recipe, data: bytes) -> Samples:
    """Apply max_length, and keep out what has nothing left to train."""
    counts = np.diff(samples.offsets)
    kept = np.minimum(counts, recipe.max_length) if recipe.max_length is not None else counts
    long = counts > kept
    if recipe.overflow == "error" and long.any():
        first = int(np.argmax(long))
        detail = f"a sample of {int(counts[first]):,} tokens is longer than max_length {recipe.max_length:,}"
        error = TooLong(detail, "raise max_length, or set overflow to 'truncate' or 'drop'")
        error.row = int(samples.rows[first])
        raise error
    keep = ~long if recipe.overflow == "drop" else np.ones(len(counts), np.bool_)
    if samples.mask is not None:
        keep &= _still_trained(samples, kept, keep, data)
    if recipe.overflow == "drop":
        samples.dropped = int(long.sum())
        samples.truncated_tokens = int(counts[long].sum())
    else:
        samples.truncated = int((long & keep).sum())
        samples.truncated_tokens = int((counts - kept)[long & keep].sum())
    return samples if keep.all() and not long.any() else _select(samples, np.where(keep, kept, 0), keep)


def _still_trained(samples: Samples, kept: np.ndarray, keep: Mask, data: bytes) -> Mask:
    """Return which samples have a trained token left; reject those of ``keep`` that have none."""
    assert samples.mask is not None
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(samples.mask, dtype=np.int64)])
    starts = samples.offsets[:-1]
    trained: Mask = sums[starts + kept] > sums[starts]
    if not trained.all():
        ends = np.append(np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")), len(data))
    for index in np.flatnonzero(keep & ~trained):
        row, count = int(samples.rows[index]), int(samples.offsets[index + 1] - starts[index])
        begin = int(ends[row - 1]) + 1 if row else 0
        detail = f"no trained token is among the {int(kept[index]):,} of {count:,} that max_length leaves"
        if kept[index] == count:
            detail = f"no token of {count:,} is trained: the tokenizer makes none of what the assistant says"
        samples.rejects.append(Reject(row, begin, int(ends[row]) - begin, "nothing_to_train", detail))
    return trained


def _select(samples: Samples, counts: np.ndarray, keep: Mask) -> Samples:
    """Keep the first ``counts[i]`` tokens of each sample, and of the samples those in ``keep``."""
    starts = samples.offsets[:-1]
    change = np.zeros(len(samples.ids) + 1, np.int32)
    np.add.at(change, starts, 1)
    np.add.at(change, starts + counts, -1)
    chosen = np.cumsum(change[:-1]) > 0
    samples.ids = samples.ids[chosen]
    samples.mask = samples.mask[chosen] if samples.mask is not None else None
    samples.rows = samples.rows[keep]
    samples.offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts[keep], dtype=np.int64)])
    return samples
