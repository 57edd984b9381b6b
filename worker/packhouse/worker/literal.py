"""Texts in which some tokens are to be read as plain text, encoded piece by piece.

The ids are those of transformers' ``apply_chat_template(..., sanitize_control_tokens=True)``: each such token is
encoded without the tokenizer's added tokens, what stands between them as ever.
"""

from collections.abc import Sequence

from packhouse.worker.control import Span
from packhouse.worker.engines import HuggingFaceEngine
from packhouse.worker.records import BadRecord


def encode_literal(text: str, literal: Sequence[Span], engine: HuggingFaceEngine) -> tuple[list[int], list[Span]]:
    """Return the ids of ``text``, those within ``literal`` as plain text, and the characters that each stands for.

    Raises ``BadRecord`` where the tokenizer makes such a token even of its letters.
    """
    ids: list[int] = []
    offsets: list[Span] = []
    done = 0
    for start, stop in [*literal, (len(text), len(text))]:
        for begin, end, plain in ((done, start, False), (start, stop, True)):
            if end > begin:
                made, places = _piece(text[begin:end], engine, plain=plain, first=begin == 0)
                if plain and engine.id_of(text[begin:end]) in made:
                    raise BadRecord("control_token", "a control token in it cannot be encoded as plain text")
                ids += made
                offsets += [(begin + left, begin + right) for left, right in places]
        done = stop
    return ids, offsets


def _piece(text: str, engine: HuggingFaceEngine, *, plain: bool, first: bool) -> tuple[list[int], list[Span]]:
    """Encode a piece as it would be within a line: a SentencePiece tokenizer puts a space before a text of its own."""
    encode = engine.plain_spans if plain else engine.spans
    if first:
        return encode(text)
    line, _ = engine.spans("\n")
    ids, offsets = encode("\n" + text)
    if ids[: len(line)] != line:
        return encode(text)
    return ids[len(line) :], [(max(left - 1, 0), right - 1) for left, right in offsets[len(line) :]]
