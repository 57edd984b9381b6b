"""The vision chat recipe: conversations with pictures, each of which takes as many tokens as its size asks for.

On the worker only the sizes of pictures are read. What the trainer's process needs to load them stands in the extra
columns that ``packhouse.client.picture_files`` describes.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from packhouse.client.digest import digest_json
from packhouse.client.errors import InvalidRequest
from packhouse.client.picture_files import COLUMNS, BrokenPicture, check_pillow, picture_size, read_picture
from packhouse.client.processor import Grid, make_processor, tokens
from packhouse.worker.control import Span, control_tokens
from packhouse.worker.engines import HuggingFaceEngine
from packhouse.worker.literal import encode_literal
from packhouse.worker.loss import trained
from packhouse.worker.masks import by_offsets
from packhouse.worker.picture_records import marked_chat
from packhouse.worker.records import BadRecord, Chat
from packhouse.worker.render import ChatTemplate, TemplateError
from packhouse.worker.tokenize_fn import File

VERSION = 1
"""Any change of what a record becomes must raise it."""
PLACEHOLDERS = ("<image>", "<IMG_CONTEXT>")
LOSSES = ("assistant", "last_turn", "completion", "all")


class VisionChat:
    """A tokenize function for chats with pictures.

    A picture becomes ``before``, one ``image_token`` for each token that ``processor`` (the settings of
    ``make_processor``) says, and ``after``; none of them is trained. Texts are encoded, masked and kept from passing
    for control tokens as in other chats. With ``decode`` every picture is decoded once, so that one whose header is
    whole and whose pixels are not is found here and not in training.
    """

    state: Literal["cache", "runtime"] = "cache"
    extra: Mapping[str, str] = COLUMNS

    def __init__(
        self,
        tokenizer: Any,
        processor: Mapping[str, Any] | None = None,
        image_token: str = "<|image_pad|>",
        before: str = "<|vision_start|>",
        after: str = "<|vision_end|>",
        placeholders: Sequence[str] = PLACEHOLDERS,
        loss: Literal["assistant", "last_turn", "completion", "all"] = "assistant",
        control: Literal["text", "reject"] = "text",
        decode: bool = False,
    ) -> None:
        if loss not in LOSSES or control not in ("text", "reject"):
            raise InvalidRequest(
                f"loss is {loss!r} and control {control!r}", f"use {', '.join(LOSSES)}, and text or reject"
            )
        if not placeholders or isinstance(placeholders, str) or not all(placeholders):
            raise InvalidRequest(f"the placeholders are {placeholders!r}", "give a list of texts")
        if tokenizer.chat_template is None:
            raise InvalidRequest("the tokenizer has no chat template", "give one as 'template'")
        check_pillow()
        self.processor = make_processor(processor or {})
        self._placeholders, self._loss, self._control, self._decode = placeholders, loss, control, decode
        self._image_token, self._before, self._after = image_token, before, after
        self._engine = HuggingFaceEngine(tokenizer.backend_tokenizer)
        self._image_id = self._id_of(image_token)
        self._template = _template(tokenizer, before, image_token, after)
        if loss != "all":
            self._template.check_mask()

    def hash(self) -> str:
        """Return what stands for this code and the processor's settings: the rest is in the job's options."""
        return digest_json(["vision", VERSION, self.processor.settings()])

    def files(self, record: dict[str, Any]) -> list[str]:
        """Return the names of a record's pictures; raise ``BadRecord``."""
        return marked_chat(record, self._placeholders)[1]

    def __call__(self, record: dict[str, Any], files: Mapping[str, File]) -> dict[str, Any]:
        """Return the ids, labels and extra columns of a record; raise ``BadRecord``."""
        chat, names, mark = marked_chat(record, self._placeholders)
        grids = [self._grid(files[name]) for name in names]
        text, spans = self._rendered(chat)
        if text.count(mark) != len(names):
            raise BadRecord("template", "the template does not write each picture once")
        text, spans, literal = self._filled(chat, text, spans, mark)
        ids, offsets = encode_literal(text, literal, self._engine)
        mask = by_offsets(spans, offsets)
        return self._expanded(np.array(ids, np.int64), mask, [files[name] for name in names], grids)

    def _id_of(self, token: str) -> int:
        ids, _ = self._engine.spans(token)
        if len(ids) != 1:
            raise InvalidRequest(
                f"the image token {token!r} is {len(ids)} tokens of the tokenizer",
                "name one of its own as image_token, before and after, among tokenize_options",
            )
        return ids[0]

    def _grid(self, file: File) -> Grid:
        try:
            if self._decode:
                return self.processor.grid(*read_picture(file.path).size)
            return self.processor.grid(*picture_size(file.path))
        except (BrokenPicture, ValueError) as error:
            raise BadRecord("broken_picture", f"the picture {file.name[:200]!r} cannot be used: {error}") from None

    def _rendered(self, chat: Chat) -> tuple[str, list[Span]]:
        """Return the chat's text and the characters of it that are trained."""
        try:
            text, generated = self._template.render(chat)
        except TemplateError as error:
            raise BadRecord("template", error.discreet(self._template.source)) from None
        if self._loss == "all":
            return text, [(0, len(text))]
        ruled = Chat(chat.messages, chat.tools, trained(chat, self._loss), chat.stated)
        spans = self._template.spans(ruled, text, generated)
        if not any(end > start for start, end in spans):
            raise BadRecord("nothing_to_train", "no assistant message to be trained")
        return text, spans

    def _filled(self, chat: Chat, text: str, spans: list[Span], mark: str) -> tuple[str, list[Span], list[Span]]:
        """Return the text with what stands for each picture, its trained characters, and its literal control tokens."""
        literal: list[Span] = []
        if self._template.control.find(chat.held):
            if self._control == "reject":
                raise BadRecord("control_token", "it holds a control token of the tokenizer")
            literal = self._template.frames(chat, text).literal
        filling = f"{self._before}{self._image_token}{self._after}"
        places = np.array([found.start() for found in re.finditer(mark, text)], np.int64)

        def moved(part: Sequence[Span]) -> list[Span]:
            borders = np.array(part, np.int64).reshape(-1, 2)
            shifted = borders + np.searchsorted(places, borders, "left") * (len(filling) - 1)
            return [(int(begin), int(end)) for begin, end in shifted]

        return text.replace(mark, filling), moved(spans), moved(literal)

    def _expanded(
        self, ids: np.ndarray, mask: np.ndarray, files: Sequence[File], grids: Sequence[Grid]
    ) -> dict[str, Any]:
        """Repeat each image token as often as its picture asks for."""
        places = np.flatnonzero(ids == self._image_id)
        if len(places) != len(files):
            raise BadRecord("picture_count", f"{len(places)} image tokens, and {len(files)} pictures")
        counts = np.ones(len(ids), np.int64)
        counts[places] = [tokens(self.processor, grid) for grid in grids]
        begins = np.cumsum(counts) - counts
        ids, mask = np.repeat(ids, counts), np.repeat(mask & self._trainable(ids), counts)
        return {
            "input_ids": ids,
            "labels": np.where(mask, ids, -100),
            "pictures": [file.name for file in files],
            "picture_digests": [file.digest for file in files],
            "picture_grids": [list(grid) for grid in grids],
            "picture_places": begins[places].tolist(),
        }

    def _trainable(self, ids: np.ndarray) -> np.ndarray:
        """Return which ids may be trained: all but those that stand for a picture and the marks around it."""
        trainable: np.ndarray = ids != self._image_id
        places = np.flatnonzero(~trainable)
        lead, trail = (len(self._engine.spans(text)[0]) if text else 0 for text in (self._before, self._after))
        for place in places.tolist():
            trainable[max(place - lead, 0) : place + 1 + trail] = False
        return trainable


def _template(tokenizer: Any, *own: str) -> ChatTemplate:
    """Return the tokenizer's chat template, which knows the control tokens, those of pictures included."""
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    now = getattr(tokenizer, "template_date", None)
    # By the slow renderer, which needs no audit: rendering is little beside the rest.
    template = ChatTemplate(tokenizer.chat_template, special, fast=False, now=now)
    added = [
        {"content": token.content, "special": token.special or token.content in own}
        for token in tokenizer.added_tokens_decoder.values()
    ]
    template.control = control_tokens(added, template.written)
    return template
