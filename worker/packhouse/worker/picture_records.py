"""Records with pictures: which files they name, and their chat with a mark where each picture stands.

Three ways to write them are read, and may not be mixed within a record:

- placeholders such as ``<image>`` in the texts, and the files under ``images`` or ``image``, in the same order;
- content parts of the types ``image`` and ``image_url``, which stand for a picture where they are;
- such parts, and placeholders in the message's texts that say where its pictures stand.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from packhouse.worker.forms import chat_of_form, field_names, recognise
from packhouse.worker.records import BadRecord, Chat, kind_of

LISTS = ("images", "image")
_TYPES = ("image", "image_url")
_MARKS = range(0xF0000, 0xFFFFE)
"""Private characters, one of which stands for a picture."""


def marked_chat(record: dict[str, Any], placeholders: Sequence[str]) -> tuple[Chat, list[str], str]:
    """Return the chat of a record, the names of its pictures in order, and the character that stands for each of them.

    Raises ``BadRecord``.
    """
    found = recognise(record)
    if found is None or found[0] not in ("messages", "conversations"):
        raise BadRecord("missing_field", "no messages and no conversations")
    form, names = found
    field = names[form]
    listed = _listed(record)
    mark = _unused(record)
    messages = record[field]
    if not isinstance(messages, list):
        raise BadRecord("wrong_type", f"field {field!r} is {kind_of(messages)}, not a list of messages")
    pictures: list[str] = []
    marked = []
    for index, message in enumerate(messages):
        if isinstance(message, dict):
            message = _message(message, index, placeholders, mark, pictures, listed is not None)
        marked.append(message)
    chat = chat_of_form({**record, field: marked}, form, field_names(form, names))
    if listed is None:
        return chat, pictures, mark
    places = sum(text.count(mark) for text in chat.strings())
    if places != len(listed):
        raise BadRecord("picture_count", f"{places} places for pictures, and {len(listed)} pictures")
    return chat, listed, mark


def _listed(record: dict[str, Any]) -> list[str] | None:
    """Return the files under ``images`` or ``image``, or None where a record has neither."""
    value = next((record[name] for name in LISTS if record.get(name) is not None), None)
    if value is None:
        return None
    return [_name(one) for one in (value if isinstance(value, list) else [value])]


def _name(value: Any) -> str:
    """Return the file that a picture's entry names: a text, or an object that holds it as ``path`` or ``url``."""
    if isinstance(value, dict):
        value = next((value[name] for name in ("url", "path") if value.get(name) is not None), None)
    if not isinstance(value, str) or not value:
        raise BadRecord("wrong_type", f"a picture is {kind_of(value)}, not the name of a file")
    name = value.removeprefix("file://")
    if "://" in name or name.startswith("data:"):
        raise BadRecord("unsupported", "a picture is not a file: nothing is fetched")
    return name


def _message(
    message: dict[str, Any], index: int, placeholders: Sequence[str], mark: str, pictures: list[str], listed: bool
) -> dict[str, Any]:
    """Return the message with marks in place of its pictures, whose names are put behind ``pictures``."""
    content = message.get("content")
    if not isinstance(content, list):
        if not listed:
            return message
        field = "content" if "content" in message else "value"
        return {**message, field: _placed(message.get(field), placeholders, mark)}
    own = [_name(_source(part)) for part in _of_pictures(content)]
    if own and listed:
        raise BadRecord("picture_count", f"message {index} has pictures, and so has the record")
    texts = "\0".join(_text(part) for part in content)
    places = sum(texts.count(placeholder) for placeholder in placeholders) if own or listed else 0
    if own and places not in (0, len(own)):
        raise BadRecord("picture_count", f"message {index} has {places} places for pictures, and {len(own)} pictures")
    pictures += own
    parts = []
    for part in content:
        if isinstance(part, dict) and part.get("type") in _TYPES:
            parts += [] if places else [{"type": "text", "text": mark}]
        elif places and _text(part):
            parts.append({"type": "text", "text": _placed(_text(part), placeholders, mark)})
        else:
            parts.append(part)
    return {**message, "content": parts}


def _of_pictures(parts: list[Any]) -> Iterator[dict[str, Any]]:
    return (part for part in parts if isinstance(part, dict) and part.get("type") in _TYPES)


def _source(part: dict[str, Any]) -> Any:
    names = (str(part["type"]), "image", "image_url", "url", "path", "value")
    return next((part[name] for name in names if part.get(name) is not None), None)


def _text(part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        return ""
    value = part.get("text", part.get("value"))
    return value if isinstance(value, str) else ""


def _placed(text: Any, placeholders: Sequence[str], mark: str) -> Any:
    if isinstance(text, str):
        for placeholder in placeholders:
            text = text.replace(placeholder, mark)
    return text


def _unused(record: dict[str, Any]) -> str:
    """Return a private character that no text of the record holds."""
    held = set(json.dumps(record, ensure_ascii=False))
    return next(chr(code) for code in _MARKS if chr(code) not in held)
