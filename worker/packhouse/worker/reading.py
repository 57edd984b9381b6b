"""Reading: from the lines of a block to texts, the characters that are trained, or ids where the records hold those."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from packhouse.worker.control import Span
from packhouse.worker.forms import chat_of_form, text_of_form, tokens_of
from packhouse.worker.literal import encode_literal
from packhouse.worker.loss import trained
from packhouse.worker.masks import by_offsets
from packhouse.worker.records import BadRecord, Chat, Line, Reject, lines, parse
from packhouse.worker.render import ChatTemplate, TemplateError
from packhouse.worker.samples import Mask

if TYPE_CHECKING:
    from packhouse.worker.tokenize import Toolkit

AUDIT_BYTES = 4 << 20
"""In a block both renderers render the first chat behind each so many bytes, plain ones and those with extras apart."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The ids of a record that are known already, and which are trained (None when all are)."""

    ids: np.ndarray[tuple[int], np.dtype[np.uint32]]
    mask: Mask | None


@dataclass(frozen=True, slots=True)
class Item:
    """A usable record."""

    line: Line
    text: str
    spans: list[Span] | None = None
    """Trained characters; None when all are."""
    encoded: Encoded | None = None
    """Its ids, where they do not come from encoding ``text`` as it stands."""


class Reader:
    """Reads a block's records, and keeps what it cannot use."""

    def __init__(self, toolkit: "Toolkit") -> None:
        self._toolkit, self._recipe = toolkit, toolkit.recipe
        self._fields = dict(toolkit.recipe.names)
        self.records = 0
        self.rejects: list[Reject] = []
        self.fallbacks: Counter[str] = Counter()
        self._audited: Counter[bool] = Counter()

    def read(self, data: bytes) -> Iterator[Item]:
        """Yield the usable records of a block."""
        for line in lines(data):
            self.records += 1
            try:
                item = self.item(line)
            except BadRecord as error:
                self.rejects.append(line.reject(error))
            except RecursionError:
                self.rejects.append(line.reject(BadRecord("unsupported", "values are nested too deeply")))
            else:
                yield item

    def item(self, line: Line) -> Item:
        """Return what a record becomes; raise ``BadRecord``."""
        record = parse(line.data)
        if self._recipe.kind == "tokens":
            tokens = tokens_of(record, self._fields, self._toolkit.vocab_size)
            return Item(line, "", encoded=Encoded(tokens.ids, tokens.trained if self._recipe.masked else None))
        return self._chat(line, record) if self._toolkit.template is not None else self._plain(line, record)

    def _plain(self, line: Line, record: dict[str, Any]) -> Item:
        text, answer = text_of_form(record, self._recipe.record, self._fields)
        spans = answer if self._recipe.masked else None
        if spans and not any(end > start for start, end in spans):
            raise BadRecord("nothing_to_train", "the answer is empty")
        literal = [] if self._recipe.control_tokens == "allow" else self._toolkit.control.find(text)
        return self._finish(line, text, spans, literal)

    def _chat(self, line: Line, record: dict[str, Any]) -> Item:
        template = self._toolkit.template
        assert template is not None
        chat = chat_of_form(record, self._recipe.record, self._fields)
        extras = chat.tools is not None or max(map(len, chat.messages), default=0) > 2
        if line.offset >= self._audited[extras] * AUDIT_BYTES:
            self._audited[extras] += 1
            template.audit(chat)
        try:
            text, generated = template.render(chat)
        except TemplateError as error:
            raise BadRecord("template", error.discreet(template.source)) from None
        literal = self._literal(template, chat, text)
        return self._finish(line, text, self._spans(template, chat, text, generated), literal)

    def _literal(self, template: ChatTemplate, chat: Chat, text: str) -> list[Span]:
        """Return where in ``text`` control tokens stand that came from the record."""
        if self._recipe.control_tokens == "allow" or not template.control.within(chat.held):
            return []
        if self._recipe.control_tokens == "reject":
            return [(0, 0)]
        return template.frames(chat, text).literal

    def _finish(self, line: Line, text: str, spans: list[Span] | None, literal: list[Span]) -> Item:
        if not literal:
            return Item(line, text, spans)
        if self._recipe.control_tokens == "reject":
            raise BadRecord("control_token", "it holds a control token of the tokenizer")
        self.fallbacks["control_tokens"] += 1
        ids, offsets = encode_literal(text, literal, self._toolkit.encoder.slow)
        mask = None if not self._recipe.masked else by_offsets(spans or [], offsets)
        return Item(line, text, spans, Encoded(np.array(ids, np.uint32), mask))

    def _spans(self, template: ChatTemplate, chat: Chat, text: str, generated: list[Span]) -> list[Span] | None:
        if not self._recipe.masked:
            return None
        if self._recipe.loss != "assistant":  # what a chat is read as is trained by that rule
            chat = replace(chat, trained=trained(chat, self._recipe.loss))
        spans = template.spans(chat, text, generated)
        if not any(end > start for start, end in spans):
            raise BadRecord("nothing_to_train", "no assistant message to be trained")
        return spans
