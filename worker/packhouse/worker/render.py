"""Rendering: from a chat to the text its template makes of it, and the character spans that are trained.

minijinja (Rust) renders where it is proven to give the text that transformers' sandboxed renderer gives, several times
faster; every other template goes the slow way, which is counted.

Spans come from ``{% generation %}`` where a template has it. Else an assistant turn runs from the end of the header
that the template writes before it to the end of the marker it writes behind it. Both are read off the template by
rendering probes, and each row is checked: as many turns as assistant messages, and no header or marker from content.
"""

import json
import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import minijinja

from packhouse.client.errors import InvalidRequest
from packhouse.worker.records import BadRecord, Chat

FUEL = 20_000_000
"""Instructions that one rendering may take."""
MAX_RENDERED = 512 << 20
"""Characters of the longest rendered chat."""

Span = tuple[int, int]

_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_GENERATION = re.compile(
    r"(?P<lead>^[ \t]*)?\{%(?P<left>[-+]?)\s*(?P<end>end)?generation\s*(?P<right>[-+]?)%\}(?P<newline>\n?)",
    re.MULTILINE,
)


class TemplateError(Exception):
    """A template that cannot render a chat, with the renderer's reason."""


class FastRenderer:
    """minijinja, set up as transformers sets up Jinja; a generation tag becomes a pair of private marks."""

    def __init__(self, source: str, variables: dict[str, Any]) -> None:
        self._variables = variables
        self._environment = minijinja.Environment(
            templates={"chat": _mark_generation(source)},
            pycompat=True,
            trim_blocks=True,
            lstrip_blocks=True,
            fuel=FUEL,
        )
        self._environment.add_filter("tojson", _tojson)
        self._environment.add_global("raise_exception", _raise_exception)

    def render(self, chat: Chat, *, prompt: bool = False) -> tuple[str, list[Span]]:
        """Return the text and its generation spans; raise ``TemplateError``."""
        try:
            text = self._environment.render_template(
                "chat", messages=chat.messages, tools=chat.tools, add_generation_prompt=prompt, **self._variables
            )
        except minijinja.TemplateError as error:
            raise TemplateError(_first_line(error)) from None
        if _OPEN not in text and _CLOSE not in text:
            return text, []
        return _take_marks(text)


class SlowRenderer:
    """transformers' own sandboxed Jinja renderer."""

    def __init__(self, source: str, variables: dict[str, Any]) -> None:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        from transformers.utils.chat_template_utils import render_jinja_template

        self._render = render_jinja_template
        self._source = source
        self._variables = variables
        self._tracks = has_generation(source)

    def render(self, chat: Chat, *, prompt: bool = False) -> tuple[str, list[Span]]:
        """Return the text and its generation spans; raise ``TemplateError``."""
        try:
            texts, spans = self._render(
                conversations=[chat.messages],
                tools=chat.tools,
                chat_template=self._source,
                return_assistant_tokens_mask=self._tracks,
                add_generation_prompt=prompt,
                **self._variables,
            )
        except Exception as error:  # a template may raise anything
            raise TemplateError(_first_line(error)) from None
        return texts[0], [(start, end) for start, end in spans[0]] if self._tracks else []


def has_generation(source: str) -> bool:
    """Return whether a template marks what the assistant generates."""
    return _GENERATION.search(source) is not None


def _mark_generation(source: str) -> str:
    """Replace the generation tags, unknown to minijinja, by expressions that write private marks.

    Expressions are not subject to ``trim_blocks`` and ``lstrip_blocks``, so what those would strip is stripped here.
    """

    def mark(match: re.Match[str]) -> str:
        left, right = match["left"], match["right"]
        lead = match["lead"] or "" if left == "+" else ""
        newline = match["newline"] if right == "+" else ""
        letter = _CLOSE if match["end"] else _OPEN
        return f'{lead}{{{{{left.replace("+", "")} "{letter}" {right.replace("+", "")}}}}}{newline}'

    return _GENERATION.sub(mark, source)


def _take_marks(text: str) -> tuple[str, list[Span]]:
    spans: list[Span] = []
    pieces: list[str] = []
    length = 0
    for index, piece in enumerate(re.split(f"([{_OPEN}{_CLOSE}])", text)):
        if index % 2 == 0:
            pieces.append(piece)
            length += len(piece)
        elif piece == _OPEN:
            spans.append((length, -1))
        elif not spans or spans[-1][1] >= 0:
            raise TemplateError("the content holds the private characters U+E0F0 or U+E0F1")
        else:
            spans[-1] = (spans[-1][0], length)
    if any(end < 0 for _, end in spans):
        raise TemplateError("a generation tag is not closed")
    return "".join(pieces), spans


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    # minijinja's own filter escapes < > & ' for HTML, which no model was trained on.
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise minijinja.TemplateError(message)


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0][:300] if lines else type(error).__name__


@dataclass(frozen=True, slots=True)
class Markers:
    """What a template writes right before and right behind an assistant's turn."""

    header: str
    end: str


class ChatTemplate:
    """A template and the ways to render it: the fast one when it is proven, and the slow one."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self.source = source
        self.generation = has_generation(source)
        self._variables = special_tokens
        self.fast: FastRenderer | None = None
        self.reason = ""
        """Why the fast renderer is not in use."""
        try:
            self.fast = FastRenderer(source, special_tokens)
        except minijinja.TemplateError as error:
            self.reason = _first_line(error)

    @cached_property
    def slow(self) -> SlowRenderer:
        """transformers' renderer, loaded when first needed."""
        return SlowRenderer(self.source, self._variables)

    def prove(self) -> None:
        """Give up the fast renderer unless it agrees with the slow one on every probe."""
        if self.fast is None:
            return
        for name, chat in PROBES.items():
            for prompt in (False, True):
                if _attempt(self.fast, chat, prompt) != _attempt(self.slow, chat, prompt):
                    self.fast = None
                    self.reason = f"minijinja and Jinja differ on the probe {name!r}"
                    return

    def render(self, chat: Chat, *, prompt: bool = False) -> tuple[str, list[Span]]:
        """Render by the best proven renderer; raise ``TemplateError``."""
        return (self.fast or self.slow).render(chat, prompt=prompt)

    def audit(self, chat: Chat) -> bool:
        """Render a chat both ways; on a difference give up the fast renderer and return False."""
        if self.fast is None or _attempt(self.fast, chat, False) == _attempt(self.slow, chat, False):
            return True
        self.fast = None
        self.reason = "minijinja and Jinja differed on a row"
        return False

    @cached_property
    def markers(self) -> Markers:
        """The header and end marker of assistant turns; raise ``InvalidRequest`` where the template has none."""
        remedy = "mark what the assistant says with {% generation %}, or set loss to 'all'"
        try:
            prompted, prompt_only = self._pieces(["user"], prompt=True), self._pieces(["user"])
            between = self._pieces(["user", "assistant", "user", "assistant"])
        except TemplateError as error:
            raise InvalidRequest(f"the chat template cannot render a plain conversation ({error})", remedy) from None
        after_user = prompt_only[-1]
        headers = [piece.removeprefix(after_user) for piece in (between[1], between[3])]
        if prompted[-1] != after_user:
            headers.append(prompted[-1].removeprefix(after_user))
        header = _common_prefix(headers)
        if not header.strip():
            header = after_user + header
        end = _common_prefix([between[2], between[4]]).rstrip()
        if not header.strip() or not end:
            missing = "before" if not header.strip() else "behind"
            raise InvalidRequest(f"the chat template writes no marker {missing} an assistant's turn", remedy)
        return Markers(header, end)

    def _pieces(self, roles: list[str], *, prompt: bool = False) -> list[str]:
        """Return the texts around the contents of a plain conversation."""
        contents = [f"Sentinel{'abcdefgh'[index] * 3}" for index in range(len(roles))]
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        text, _ = self.render(Chat(messages), prompt=prompt)
        pieces = []
        for content in contents:
            piece, found, text = text.partition(content)
            if not found:
                raise TemplateError("a message's content does not show")
            pieces.append(piece)
        return [*pieces, text]

    def spans(self, chat: Chat, text: str, generated: list[Span]) -> list[Span]:
        """Return the trained character spans of a rendered chat; raise ``BadRecord`` when they cannot be told."""
        turns = generated if self.generation else self._turns(chat, text)
        if len(turns) != len(chat.trained):
            if self.generation and all(chat.trained):
                return turns
            detail = f"{len(chat.trained)} assistant messages, and {len(turns)} turns in the rendered text"
            raise BadRecord("no_sound_mask", detail)
        return [turn for turn, trained in zip(turns, chat.trained, strict=True) if trained]

    def _turns(self, chat: Chat, text: str) -> list[Span]:
        header, end = self.markers.header, self.markers.end
        if any(header in string or end in string for string in chat.strings()):
            text = self._blank_contents(chat, text)
        turns: list[Span] = []
        stop = 0
        while (start := text.find(header, stop)) >= 0:
            start += len(header)
            stop = text.find(end, start)
            if stop < 0:
                raise BadRecord("no_sound_mask", "an assistant's turn has no end marker")
            stop += len(end)
            turns.append((start, stop))
        return turns

    def _blank_contents(self, chat: Chat, text: str) -> str:
        """Return ``text`` with the contents blanked, so that markers in them cannot be taken for the template's.

        The frames come from rendering the chat with sentinels for contents; only if frames and contents together give
        ``text`` exactly is it known which characters are content.
        """
        reason = BadRecord("no_sound_mask", "the content holds a turn marker, and the template alters content")
        contents = [message["content"] for message in chat.messages]
        sentinels = [f"Sentinel{index}x" for index in range(len(contents))]
        messages = [
            {"role": message["role"], "content": sentinel}
            for message, sentinel in zip(chat.messages, sentinels, strict=True)
        ]
        if any(set(message) > {"role", "content"} for message in chat.messages) or chat.tools:
            raise reason
        try:
            frames, _ = self.render(Chat(messages))
        except TemplateError:
            raise reason from None
        rebuilt, blanked = [], []
        for sentinel, content in zip(sentinels, contents, strict=True):
            frame, found, frames = frames.partition(sentinel)
            if not found:
                raise reason
            rebuilt += [frame, content]
            blanked += [frame, "\0" * len(content)]
        if "".join(rebuilt) + frames != text:
            raise reason
        return "".join(blanked) + frames


def _common_prefix(texts: list[str]) -> str:
    first, last = min(texts), max(texts)
    length = next((index for index, letter in enumerate(first) if letter != last[index]), len(first))
    return first[:length]


def _attempt(renderer: FastRenderer | SlowRenderer, chat: Chat, prompt: bool) -> tuple[str, list[Span]] | None:
    try:
        return renderer.render(chat, prompt=prompt)
    except TemplateError:
        return None  # both must refuse; their words may differ


def _chat(*messages: tuple[str, str], tools: list[dict[str, Any]] | None = None) -> Chat:
    return Chat([{"role": role, "content": content} for role, content in messages], tools)


_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather <at> a 'place' & time, 天气",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln <&'>", "days": 2, "f": 0.5}}}

PROBES: dict[str, Chat] = {
    "one turn": _chat(("user", "Hi"), ("assistant", "Hello.")),
    "system": _chat(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello.")),
    "two turns": _chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")),
    "prompt only": _chat(("user", "Hi")),
    "white space": _chat(("user", "  a \n\n"), ("assistant", "\n b\t \n"), ("user", ""), ("assistant", " ")),
    "markup": _chat(("user", "<b>&amp;'\"</b> {{ x }} {% y %}"), ("assistant", "{# z #} \\n 你好 é 😀")),
    "thinking": _chat(("user", "a"), ("assistant", "<think>\nhm\n</think>\n\nb"), ("user", "c"), ("assistant", "d")),
    "reasoning": Chat(
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "reasoning_content": "hm", "thinking": "hm"},
        ]
    ),
    "tools": Chat(
        [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL, _CALL]},
            {"role": "tool", "content": '{"t": 3}', "name": "weather"},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "Three."},
        ],
        [_TOOL],
    ),
    "assistant first": _chat(("assistant", "A"), ("user", "q")),
    "unknown role": _chat(("narrator", "x"), ("assistant", "y")),
}
