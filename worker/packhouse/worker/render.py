"""Rendering: from a chat to the text its template makes of it, and the character spans that are trained.

minijinja (Rust) renders where it is proven to give the text that transformers' sandboxed renderer gives, several times
faster; every other template goes the slow way, which is counted.

Spans come from ``{% generation %}`` where a template has it. Else an assistant turn runs from the end of the header
that the template writes before it to the end of the marker it writes behind it. Both are read off the template by
rendering probes, and each row is checked: as many turns as assistant messages, and no header or marker from content.
Where a content could pass for one, the contents' places in the text are found first (``frames``).
"""

from functools import cached_property

import minijinja

from packhouse.client.errors import InvalidRequest
from packhouse.worker.control import ControlTokens
from packhouse.worker.frames import Frames, find_frames
from packhouse.worker.markers import Markers, common_prefix, find_turns
from packhouse.worker.probes import CHATS
from packhouse.worker.records import BadRecord, Chat
from packhouse.worker.renderers import (
    FastRenderer,
    SlowRenderer,
    Span,
    TemplateError,
    for_slow,
    has_generation,
    pinned_clock,
)

__all__ = ["ChatTemplate", "Span", "TemplateError"]

MAX_RENDERED = 512 << 20
"""Characters of the longest rendered chat."""


_SENTINELS = [f"Sentinel{letter * 3}" for letter in "abcd"]
_ORDERS = [
    ["user", "assistant"],
    ["assistant", "user"],
    ["assistant", "user", "assistant", "user"],
    ["system", "user", "assistant"],
    ["system", "user", "assistant", "assistant"],
    ["user", "assistant", "assistant"],
    ["user", "user", "assistant"],
    ["user", "assistant", "tool", "assistant"],
]
"""Orders of roles that show whether a marker is the assistant's own."""


class ChatTemplate:
    """A template and the ways to render it: the fast one when it is proven, and the slow one."""

    def __init__(
        self, source: str, special_tokens: dict[str, str], *, fast: bool = True, now: str | None = None
    ) -> None:
        self.source = source
        self.generation = has_generation(source)
        self.control = ControlTokens(())
        """The tokens of the tokenizer that a content must not pass for."""
        self._variables = special_tokens | (pinned_clock(now) if now else {})
        self.fast: FastRenderer | None = None
        self.reason = ""
        """Why the fast renderer is not in use."""
        self.audit_failed = False
        if not fast:
            self.reason = "switched off for this recipe"
            return
        try:
            self.fast = FastRenderer(source, self._variables)
        except minijinja.TemplateError as error:
            self.reason = str(error).partition("\n")[0][:300]

    @cached_property
    def slow(self) -> SlowRenderer:
        """transformers' renderer, loaded when first needed."""
        return SlowRenderer(self.source, self._variables)

    def prove(self) -> None:
        """Give up the fast renderer unless it agrees with the slow one on every probe."""
        if self.fast is None:
            return
        for name, chat in CHATS.items():
            for prompt in (False, True):
                if _attempt(self.fast, chat, prompt) != _attempt(self.slow, chat, prompt):
                    self.fast = None
                    self.reason = f"minijinja and Jinja differ on the probe {name!r}"
                    return
        self.fast.trust()

    def render(self, chat: Chat, *, prompt: bool = False) -> tuple[str, list[Span]]:
        """Render by the best proven renderer; raise ``TemplateError``."""
        fast = None if for_slow(chat) else self.fast
        try:
            text, spans = (fast or self.slow).render(chat, prompt=prompt)
        except TemplateError as error:
            if fast is None or error.kind == "OutOfFuel":
                raise
            text, spans = self.slow.render(chat, prompt=prompt)
            self._distrust()
        if len(text) > MAX_RENDERED:
            raise TemplateError(f"{len(text)} characters, and the limit is {MAX_RENDERED}", "too large")
        return text, spans

    def check(self) -> None:
        """Raise ``InvalidRequest`` unless some trial conversation can be rendered, and each in bounded time."""
        reasons: list[str] = []
        for chat in CHATS.values():
            try:
                self.render(chat)
            except TemplateError as error:
                reasons.append(str(error))
                if error.kind in ("OutOfFuel", "TimeOut"):
                    reasons = [str(error)] * len(CHATS)
                    break
        if len(reasons) == len(CHATS):
            detail = f"the chat template cannot render a conversation ({reasons[0]})"
            raise InvalidRequest(detail, "correct the template")

    def audit(self, chat: Chat) -> bool:
        """Render a chat both ways; on a difference give up the fast renderer and return False."""
        if self.fast is None or for_slow(chat):
            return True
        if _attempt(self.fast, chat, False) == _attempt(self.slow, chat, False):
            return True
        self._distrust()
        return False

    def _distrust(self) -> None:
        self.fast = None
        self.reason = "minijinja and Jinja differed on a row"
        self.audit_failed = True

    def check_mask(self) -> None:
        """Raise ``InvalidRequest`` where what is trained cannot be told: no markers, or tags around something else."""
        if not self.generation:
            _ = self.markers
            return
        remedy = "let {% generation %} stand around all that the assistant says, and nothing else"
        for roles in _ORDERS:
            try:
                text, spans = self.render(Chat(_messages(roles)))
            except TemplateError:
                continue
            marked = {name for name in _SENTINELS if any(name in text[start:stop] for start, stop in spans)}
            own = [content for role, content in zip(roles, _SENTINELS, strict=False) if role == "assistant"]
            if not marked <= set(own):
                detail = "the chat template's generation tags mark what others than the assistant say"
                raise InvalidRequest(detail, remedy)
            if roles[-1] == "assistant" and own[-1] in text and own[-1] not in marked:
                detail = "the chat template's generation tags leave out the assistant's last answer"
                raise InvalidRequest(detail, remedy)

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
        header = common_prefix(headers)
        if not header.strip():
            header = after_user + header
        end = common_prefix([between[2], between[4]]).rstrip()
        if not header.strip() or not end:
            missing = "before" if not header.strip() else "behind"
            raise InvalidRequest(f"the chat template writes no marker {missing} an assistant's turn", remedy)
        markers = Markers(header, end)
        for roles in _ORDERS:
            if not self._tells_apart(markers, roles):
                detail = f"{header!r}, which the chat template writes before an assistant's turn, is not only there"
                raise InvalidRequest(detail, remedy)
        return markers

    def _tells_apart(self, markers: Markers, roles: list[str]) -> bool:
        """Return whether the turns found in a conversation are the assistant's, if as many are found as there are."""
        try:
            text, _ = self.render(Chat(_messages(roles)))
        except TemplateError:
            return True
        turns = find_turns(text, markers)
        own = [content for role, content in zip(roles, _SENTINELS, strict=False) if role == "assistant"]
        if turns is None or len(turns) != len(own):
            return roles != _ORDERS[0]  # a row like this is kept out, but a plain one must not be
        pairs = zip(turns, own, strict=True)
        return all([name for name in _SENTINELS if name in text[start:stop]] == [mine] for (start, stop), mine in pairs)

    def _pieces(self, roles: list[str], *, prompt: bool = False) -> list[str]:
        """Return the texts around the contents of a plain conversation."""
        text, _ = self.render(Chat(_messages(roles)), prompt=prompt)
        pieces = []
        for content in _SENTINELS[: len(roles)]:
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
        markers = self.markers
        if markers.header not in chat.held and markers.end not in chat.held:
            turns = find_turns(text, markers)
            if turns is not None:
                return turns
        # A marker stands in a content, or content and template together happen to form one.
        if any(markers.header in message["role"] or markers.end in message["role"] for message in chat.messages):
            raise BadRecord("no_sound_mask", "a role holds a turn marker")
        turns = find_turns(self.frames(chat, text).blanked, markers)
        if turns is None:
            raise BadRecord("no_sound_mask", "the assistant's turns cannot be told from the rendered text")
        return turns

    def frames(self, chat: Chat, text: str) -> Frames:
        """Return which characters of ``text``, which the chat was rendered to, came from contents.

        Raises ``BadRecord`` where that cannot be told.
        """
        found = find_frames(chat, text, self._looked_for, self._rendered)
        if found is None:
            detail = "the content holds a turn marker or a control token, and the template alters content"
            raise BadRecord("no_sound_mask", detail)
        return found

    def _rendered(self, chat: Chat) -> str | None:
        try:
            return self.render(chat)[0]
        except TemplateError:
            return None

    @cached_property
    def _looked_for(self) -> ControlTokens:
        """The control tokens, and those turn markers that do not hold one."""
        tokens = self.control.tokens
        try:
            marks = [] if self.generation else [self.markers.header.strip(), self.markers.end.strip()]
        except InvalidRequest:
            marks = []
        return ControlTokens([*tokens, *(mark for mark in marks if not any(token in mark for token in tokens))])

    @cached_property
    def written(self) -> list[str]:
        """What the template writes around the contents of a plain conversation; nothing if that cannot be told."""
        try:
            around = [*self._pieces(["user", "user"]), *self._pieces(["user"], prompt=True)]
            answered = self._pieces(["user", "assistant", "user", "assistant"])
        except TemplateError:
            return []
        # What stands in a turn before an answer, such as <think>, is the answer's; its end is not.
        return [*around, common_prefix([answered[2], answered[4]])]


def _messages(roles: list[str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in zip(roles, _SENTINELS, strict=False)]


def _attempt(renderer: FastRenderer | SlowRenderer, chat: Chat, prompt: bool) -> tuple[str, list[Span]] | None:
    try:
        return renderer.render(chat, prompt=prompt)
    except TemplateError:
        return None  # both must refuse; their words may differ
