"""Frames: which characters of a rendered chat came from its contents, and which the template wrote.

Contents are rendered once more between private marks. Only if that gives the very text, marks taken out, is it known
where they ended up; a template that alters what it is given in a way that depends on it is so found out.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from packhouse.worker.control import ControlTokens, Span
from packhouse.worker.records import Chat

_PRIVATE = range(0xE100, 0xF8FF)


@dataclass(frozen=True, slots=True)
class Frames:
    """Where the contents stand in a rendered chat."""

    blanked: str
    """The text with what came from contents replaced by zero characters, as far as it is known or matters."""
    literal: list[Span]
    """Characters of the tokens looked for that came from contents."""


def find_frames(chat: Chat, text: str, tokens: ControlTokens, render: Callable[[Chat], str | None]) -> Frames | None:
    """Return where contents stand in ``text``, which ``chat`` was rendered to, or None if that cannot be told.

    Marks stand around each of ``tokens`` in any string, and around each whole content; where a template looks into
    contents so that the latter change its text, around the tokens alone.
    """
    letters = _unused(chat)
    for whole in (True, False):
        rendered = render(_mark(chat, tokens, letters, whole=whole))
        if rendered is not None:
            clean, literal, contents = _unmark(rendered, tokens, letters)
            if clean == text:
                return Frames(_blank(text, literal + contents), literal)
    return None


def _unused(chat: Chat) -> list[str]:
    """Return four private characters that the chat does not hold, so that nobody can forge a mark."""
    held = set(chat.held)
    return [chr(code) for code in _PRIVATE if chr(code) not in held][:4]


def _mark(chat: Chat, tokens: ControlTokens, letters: list[str], *, whole: bool) -> Chat:
    begin, end, left, right = letters

    def tokens_marked(value: Any) -> Any:
        if isinstance(value, str):
            return tokens.pattern.sub(lambda match: f"{begin}{match[0]}{end}", value)
        if isinstance(value, dict):
            return {name: tokens_marked(item) for name, item in value.items()}
        return [tokens_marked(item) for item in value] if isinstance(value, list) else value

    def content(value: str) -> str:
        core = value.strip()  # so that a template may strip what is around
        if not whole or not core:
            return str(tokens_marked(value))
        lead = value[: len(value) - len(value.lstrip())]
        return f"{lead}{left}{tokens_marked(core)}{right}{value[len(lead) + len(core) :]}"

    messages = [
        {
            name: value if name == "role" else content(value) if name == "content" else tokens_marked(value)
            for name, value in message.items()
        }
        for message in chat.messages
    ]
    return replace(chat, messages=messages, tools=tokens_marked(chat.tools))


def _unmark(rendered: str, tokens: ControlTokens, letters: list[str]) -> tuple[str, list[Span], list[Span]]:
    """Return the text without marks, the tokens that stood between some, and the contents that did.

    A mark without its partner, as is left when a template splits a content, only goes away.
    """
    begin, end, left, right = letters
    literal: list[Span] = []
    contents: list[Span] = []
    pieces: list[str] = []
    length = 0
    token = content = -1
    for piece in _pieces(rendered, letters):
        if piece == begin:
            token = length
        elif piece == left:
            content = length
        elif piece == end:
            if token >= 0 and pieces and pieces[-1] in tokens.tokens and length - token == len(pieces[-1]):
                literal.append((token, length))
            token = -1
        elif piece == right:
            if content >= 0:
                contents.append((content, length))
            content = -1
        else:
            pieces.append(piece)
            length += len(piece)
    return "".join(pieces), literal, contents


def _pieces(rendered: str, letters: list[str]) -> Iterator[str]:
    return (piece for piece in re.split(f"([{''.join(letters)}])", rendered) if piece)


def _blank(text: str, spans: list[Span]) -> str:
    pieces: list[str] = []
    done = 0
    for start, stop in sorted(spans):
        if stop > done:
            pieces += [text[done:start], "\0" * (stop - max(start, done))]
            done = stop
    return "".join([*pieces, text[done:]])
