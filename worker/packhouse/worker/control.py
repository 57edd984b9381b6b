"""Control tokens: those that steer a model, and must not do so when they stand in what a user wrote."""

import re
from collections.abc import Iterable

Span = tuple[int, int]


class ControlTokens:
    """A set of tokens, and where texts hold them. A longer token is found before one that it contains."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self.tokens = frozenset(token for token in tokens if token and not token.isspace())
        self._beginnings = {token[:2] for token in self.tokens}
        longest = sorted(self.tokens, key=lambda token: (-len(token), token))
        self.pattern = re.compile("|".join(map(re.escape, longest)) or "(?!)")

    def find(self, text: str) -> list[Span]:
        """Return where the tokens stand in ``text``."""
        return [match.span() for match in self.pattern.finditer(text)] if self._may_hold(text) else []

    def within(self, text: str) -> bool:
        """Return whether ``text`` holds one."""
        return self._may_hold(text) and self.pattern.search(text) is not None

    def _may_hold(self, text: str) -> bool:
        return any(beginning in text for beginning in self._beginnings)


def control_tokens(added: Iterable[dict[str, object]], frames: Iterable[str]) -> ControlTokens:
    """Return the control tokens of a tokenizer and a template.

    These are the special ones, and of the other added tokens those in ``frames``: what the template writes around
    the contents of a plain conversation. Tokens such as ``<think>``, which answers are made of, are not.
    """
    text = "\0".join(frames)
    names = [(str(token["content"]), bool(token.get("special"))) for token in added]
    return ControlTokens(name for name, special in names if special or name in text)
