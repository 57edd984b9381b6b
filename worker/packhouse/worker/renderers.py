"""The two renderers: minijinja, set up as transformers sets up Jinja, and transformers' own, bounded in time.

Neither lets a template change what it is given, and neither runs for ever: minijinja counts instructions, and the
slow renderer is interrupted.
"""

import json
import re
from dataclasses import dataclass
from datetime import date, datetime
from functools import cached_property
from typing import Any, NoReturn

import minijinja

from packhouse.worker.libraries import chat_renderer, template_globals, template_tokens
from packhouse.worker.records import Chat
from packhouse.worker.watchdog import PastLimits, limited

FUEL = 20_000_000
"""Instructions that one rendering may take."""
MAX_SECONDS = 5.0
"""Seconds that one rendering by the slow renderer may take,"""
MAX_GROWTH = 2 << 30
"""and bytes by which the process may grow meanwhile. The fast one is bounded by its fuel, which long texts use up."""

Span = tuple[int, int]

_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_GENERATION = re.compile(
    r"(?P<lead>^[ \t]*)?\{%(?P<left>[-+]?)\s*(?P<end>end)?generation\s*(?P<right>[-+]?)%\}(?P<newline>\n?)",
    re.MULTILINE,
)


_LAYOUT = re.compile(r"(?:[^%]|%[-#]?[A-Za-z%])*")
_CHANGES = re.compile("append|clear|extend|insert|pop|remove|reverse|sort|setdefault|update|attr")


class TemplateError(Exception):
    """A template that cannot render a chat, with the renderer's reason."""

    def __init__(self, message: str, kind: str = "", line: int | None = None) -> None:
        super().__init__(message, kind, line)
        self.message, self.kind, self.line = message, kind, line

    def __str__(self) -> str:
        return self.message

    def discreet(self, source: str) -> str:
        """Return a reason that shows nothing of the chat: the template's own words, or where it failed."""
        if self.message in source:
            return self.message
        return f"{self.kind} in line {self.line} of the chat template" if self.line else self.kind


class FastRenderer:
    """minijinja, set up as transformers sets up Jinja; a generation tag becomes a pair of private marks."""

    def __init__(self, source: str, variables: dict[str, Any]) -> None:
        self._variables = variables
        self._marked = has_generation(source)
        self._changes = _CHANGES.search(source) is not None
        self._frozen = True
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
                "chat",
                messages=_frozen(chat.messages) if self._frozen else chat.messages,
                tools=_frozen(chat.tools) if self._frozen else chat.tools,
                documents=None,
                add_generation_prompt=prompt,
                **self._variables,
            )
        except minijinja.TemplateError as error:
            raise TemplateError(_first_line(error), str(error.kind), error.line) from None
        except Exception as error:  # what Python objects raise when a template uses them
            raise TemplateError(_first_line(error), type(error).__name__) from None
        return _take_marks(text) if self._marked else (text, [])

    def trust(self) -> None:
        """Render without a frozen copy, which costs as much again, if the template names no method that changes."""
        self._frozen = self._changes


class SlowRenderer:
    """transformers' own sandboxed Jinja renderer."""

    def __init__(self, source: str, variables: dict[str, Any]) -> None:
        self._render = chat_renderer()
        self._variables = dict(variables)
        self._clock: _Clock | None = self._variables.pop("strftime_now", None)
        # transformers keeps compiled templates by their source: the day in it makes this one nobody else's.
        self._source = source if self._clock is None else f"{{{{ '' if '{self._clock.day}' }}}}{source}"
        self._tracks = has_generation(source)

    def render(self, chat: Chat, *, prompt: bool = False) -> tuple[str, list[Span]]:
        """Return the text and its generation spans; raise ``TemplateError``."""
        try:
            if self._raises_to_powers:
                raise TemplateError("a chat template may not raise to powers, which nothing can interrupt", "powers")
            with limited(MAX_SECONDS, MAX_GROWTH):
                if self._clock is not None:  # each time: transformers keeps only so many compiled templates
                    template_globals(self._source)["strftime_now"] = self._clock
                texts, spans = self._render(
                    conversations=[chat.messages],
                    tools=chat.tools,
                    chat_template=self._source,
                    return_assistant_tokens_mask=self._tracks,
                    add_generation_prompt=prompt,
                    **self._variables,
                )
        except TemplateError:
            raise
        except (PastLimits, MemoryError):
            limits = f"{MAX_SECONDS:g} seconds or {MAX_GROWTH >> 20:,} MiB"
            raise TemplateError(f"rendering took more than {limits}", "TimeOut") from None
        except Exception as error:  # a template may raise anything
            raise TemplateError(_first_line(error), type(error).__name__, _template_line(error)) from None
        return texts[0], [(start, end) for start, end in spans[0]] if self._tracks else []

    @cached_property
    def _raises_to_powers(self) -> bool:
        """Whether it has the operator ``**``; Jinja computes such constants before anything is rendered."""
        return any(kind == "operator" and value == "**" for _, kind, value in template_tokens(self._source))


def pinned_clock(now: str) -> dict[str, Any]:
    """Return what a template gets to ask for the date: the day ``now``, YYYY-MM-DD, whenever it asks."""
    return {"strftime_now": _Clock(date.fromisoformat(now))}


@dataclass(frozen=True, slots=True)
class _Clock:
    day: date

    def __call__(self, layout: str) -> str:
        if len(layout) > 200 or not _LAYOUT.fullmatch(layout):
            raise ValueError("the layout of the date is not one of strftime's plain ones")
        return datetime.combine(self.day, datetime.min.time()).strftime(layout)


def has_generation(source: str) -> bool:
    """Return whether a template marks what the assistant generates."""
    return _GENERATION.search(_COMMENT.sub("", source)) is not None


def for_slow(chat: Chat) -> bool:
    """Return whether a chat holds what only the slow renderer renders right.

    That is the private characters by which the fast one marks generation, and the four separators that are white
    space to Python's ``strip`` and ``split`` and not to Unicode.
    """
    return any(letter in chat.held for letter in _FOR_SLOW)


_FOR_SLOW = (_OPEN, _CLOSE, "\x1c", "\x1d", "\x1e", "\x1f")


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
            raise TemplateError("a generation tag is closed twice", "marks")
        else:
            spans[-1] = (spans[-1][0], length)
    if any(end < 0 for _, end in spans):
        raise TemplateError("a generation tag is not closed", "marks")
    return "".join(pieces), spans


def _refuse(*_: object, **__: object) -> NoReturn:
    raise TypeError("a template may not change what it is given")


class _FrozenDict(dict[str, Any]):
    clear = pop = popitem = setdefault = update = _refuse


class _FrozenList(list[Any]):
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse


def _frozen(value: Any) -> Any:
    """Return a copy that no method of its parts can change: minijinja would call those of a plain list."""
    if isinstance(value, dict):
        return _FrozenDict({name: item if type(item) is str else _frozen(item) for name, item in value.items()})
    return _FrozenList(map(_frozen, value)) if isinstance(value, list) else value


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    # minijinja's own filter escapes < > & ' for HTML, which no model was trained on.
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise minijinja.TemplateError(message)


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _template_line(error: BaseException) -> int | None:
    """Return the line of the template that an error of Jinja came from."""
    line, trace = getattr(error, "lineno", None), error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
