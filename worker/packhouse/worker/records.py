"""Records: from the lines of a block to texts and chats, with a reason for each one kept out."""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import orjson

MAX_RECORD = 256 << 20
"""Bytes of the longest line that is read."""

_BOM = b"\xef\xbb\xbf"
_REASONING = ("reasoning_content", "thinking", "reasoning")
_PARTS = ("text", "reasoning", "tool_call", "image", "image_url", "video", "video_url", "audio", "input_audio", "file")
_WEIGHTS = ("loss", "loss_weight", "weight")


class BadRecord(Exception):
    """A record that cannot be used: a reason to count by, and a detail that shows none of its content."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Reject:
    """Where in its block a bad record stands, and why it is out. It never holds the record."""

    row: int
    offset: int
    length: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a block that is not blank."""

    row: int
    """Number in the block, from 0, blank lines included."""
    offset: int
    """Bytes from the start of the block."""
    data: bytes

    def reject(self, error: BadRecord) -> Reject:
        """Return the quarantine entry of this line."""
        return Reject(self.row, self.offset, len(self.data), error.reason, error.detail)


def lines(data: bytes) -> Iterator[Line]:
    """Yield the lines of a block.

    A byte-order mark is skipped on any line, as files joined end to end leave them: what a block means depends on its
    bytes alone, and not on where in which source it stands.
    """
    offset = 0
    for row, line in enumerate(io.BytesIO(data)):  # one line at a time in memory, and the block itself not copied
        text = line.removeprefix(_BOM).removesuffix(b"\n")
        if text.strip():
            yield Line(row, offset + (len(_BOM) if line.startswith(_BOM) else 0), text)
        offset += len(line)


def parse(line: bytes) -> dict[str, Any]:
    """Return the JSON object in ``line``; raise ``BadRecord``."""
    if len(line) > MAX_RECORD:
        raise BadRecord("too_large", f"{len(line)} bytes, and the limit is {MAX_RECORD}")
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise _json_error(line, error) from None
    if b'"tool' in line:  # orjson turns integers beyond 64 bits into floats, and a template may print those of a tool
        record = json.loads(line)
    if not isinstance(record, dict):
        raise BadRecord("not_an_object", f"a record is a JSON object, and this is {kind_of(record)}")
    return record


def _json_error(line: bytes, error: orjson.JSONDecodeError) -> BadRecord:
    try:
        line.decode()
    except UnicodeDecodeError as wrong:
        return BadRecord("invalid_utf8", f"byte {wrong.start} of the line is not UTF-8")
    return BadRecord("invalid_json", str(error))


def text_of(record: dict[str, Any], name: str) -> str:
    """Return the text under ``name``; raise ``BadRecord``."""
    if name not in record:
        raise BadRecord("missing_field", f"no field {name!r}; there are {names_of(record)}")
    text = record[name]
    if not isinstance(text, str):
        raise BadRecord("wrong_type", f"field {name!r} is {kind_of(text)}, not a string")
    return text


@dataclass(frozen=True)
class Chat:
    """A conversation in the form that chat templates read."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    trained: list[bool] = field(default_factory=list)
    """For each assistant message, in order, whether its tokens may be trained."""
    stated: list[bool | None] = field(default_factory=list)
    """For each of them what the record itself says of that, if it says anything."""

    def strings(self) -> list[str]:
        """Return every string that came from the record and could show in the rendered text."""
        found: list[str] = []
        for message in self.messages:
            for value in message.values():
                if isinstance(value, str):
                    found.append(value)
                else:
                    found.extend(_strings(value))
        found.extend(_strings(self.tools))
        return found

    @cached_property
    def held(self) -> str:
        """Those strings with zero characters between them, to look for something in all of them at once."""
        return "\0".join(self.strings())


def list_of(record: dict[str, Any], name: str) -> list[Any]:
    """Return the list under ``name``, which is not empty; raise ``BadRecord``."""
    if name not in record:
        raise BadRecord("missing_field", f"no field {name!r}; there are {names_of(record)}")
    items = record[name]
    if not isinstance(items, list):
        raise BadRecord("wrong_type", f"field {name!r} is {kind_of(items)}, not a list of messages")
    if not items:
        raise BadRecord("empty", f"field {name!r} has no message")
    return items


def chat_from(items: list[Any], tools: Any) -> Chat:
    """Return the chat of some messages and tools; raise ``BadRecord``.

    Content is a string or a list of typed parts: ``text``, ``reasoning`` and ``tool_call`` with their text under
    ``text`` or ``value``. A zero under ``loss``, ``loss_weight`` or ``weight`` keeps an assistant message untrained;
    other weights than 0 and 1 are refused.
    """
    messages: list[dict[str, Any]] = []
    stated: list[bool | None] = []
    for index, item in enumerate(items):
        message, weight = _message(item, index)
        messages.append(message)
        if message["role"] == "assistant":
            stated.append(None if weight is None else weight != 0)
        elif weight:
            raise BadRecord("unsupported", f"message {index} asks to be trained, and is not the assistant's")
    return Chat(messages, _tools(tools), [one is not False for one in stated], stated)


def _message(item: Any, index: int) -> tuple[dict[str, Any], float | None]:
    if not isinstance(item, dict):
        raise BadRecord("wrong_type", f"message {index} is {kind_of(item)}, not an object")
    if len(item) == 2 and isinstance(item.get("role"), str) and isinstance(item.get("content"), str):
        return item, None
    message = {name: value for name, value in item.items() if value is not None and name not in _WEIGHTS}
    weight = next((item[name] for name in _WEIGHTS if item.get(name) is not None), None)
    if weight is not None and not isinstance(weight, int | float):
        raise BadRecord("wrong_type", f"the loss weight of message {index} is {kind_of(weight)}, not a number")
    if weight not in (None, 0, 1):
        detail = f"the loss weight of message {index} is neither 0 nor 1: a token is trained or it is not"
        raise BadRecord("unsupported", detail)
    if not isinstance(message.get("role"), str):
        raise BadRecord("missing_field", f"message {index} has no role")
    if not _objects(message.get("tool_calls", [])):
        raise BadRecord("wrong_type", f"the tool calls of message {index} are not a list of objects")
    content = message.get("content")
    if isinstance(content, list):
        message.update(_parts(content, index))
    elif content is None and message.get("tool_calls"):
        message["content"] = ""
    elif not isinstance(content, str):
        raise BadRecord("wrong_type", f"the content of message {index} is {kind_of(content)}, not a string")
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is not None:  # templates read it under several names
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message, weight


def _parts(parts: list[Any], index: int) -> dict[str, Any]:
    """Join typed content parts into the fields that templates read."""
    text: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        value = part.get("text", part.get("value")) if isinstance(part, dict) else None
        if kind not in ("text", "reasoning", "tool_call") or not isinstance(value, str):
            shown = repr(kind) if kind in _PARTS else "another kind"
            raise BadRecord("unsupported", f"message {index} has a content part of type {shown} that cannot be used")
        if kind == "tool_call":
            calls.append({"type": "function", "function": loads(value, f"a tool call of message {index}")})
        else:
            (text if kind == "text" else reasoning).append(value)
    fields: dict[str, Any] = {"content": "".join(text)}
    if reasoning:
        fields["reasoning_content"] = "".join(reasoning)
    if calls:
        fields["tool_calls"] = calls
    return fields


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    value = loads(tools, "field 'tools'") if isinstance(tools, str) and tools else tools
    if not value:
        return None
    if not _objects(value):
        raise BadRecord("wrong_type", "field 'tools' is not a list of objects")
    return list(value)


def _objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def loads(text: str, what: str) -> Any:
    """Return the value of a JSON text within a record; raise ``BadRecord``."""
    try:
        orjson.loads(text)  # refuses NaN, lone surrogates and endless nesting, which json takes
        return json.loads(text)
    except ValueError:
        raise BadRecord("invalid_json", f"{what} is not valid JSON") from None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def kind_of(value: Any) -> str:
    """Return what kind of JSON value this is, in words."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def names_of(record: dict[str, Any]) -> str:
    """Return the names of a record's fields, in words."""
    names = sorted(record)
    return ", ".join(repr(name[:40]) for name in names[:8]) + (", …" if len(names) > 8 else "") if names else "none"
