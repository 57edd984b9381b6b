"""JSON arrays as JSON lines: one element after another, without the whole array in memory."""

import codecs
import json
from collections.abc import Iterator

from packhouse.worker.cutting import MAX_LINE

_SPACE = " \t\r\n"
_AFTER = {*_SPACE, ",", "]"}
_OPEN_STRING = "Unterminated string"
_LONGEST_WORD = 16
"""An error that stands further before the end of what is read so far would stay if more were read."""


class BrokenArray(Exception):
    """An array that is cut or is none; the message says at which element."""


def elements(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the elements of a JSON array as they are written, each on one line; raise ``BrokenArray``.

    Bytes that are not UTF-8 pass through: the record that they stand in is refused later, and no other.
    """
    reader = _Text(chunks)
    if reader.skip("\ufeff" + _SPACE) != "[":
        raise BrokenArray("it is not a JSON array")
    reader.take(1)
    count = 0
    if reader.skip(_SPACE) == "]":
        reader.take(1)
    else:
        while True:
            yield _line(reader.element(count))
            count += 1
            letter = reader.skip(_SPACE)
            reader.take(1)
            if letter == "]":
                break
            if letter != ",":
                raise BrokenArray(f"the array is cut or broken behind its element {count}")
            reader.skip(_SPACE)
    if reader.skip(_SPACE):
        raise BrokenArray(f"something follows the array of {count} elements")


def _line(text: str) -> bytes:
    # Between the parts of a value a line end is white space; within a string it cannot stand.
    return text.replace("\r", " ").replace("\n", " ").encode("utf-8", "surrogateescape") + b"\n"


class _Text:
    """The text of the chunks, from the place where reading stands."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._scanner = json.JSONDecoder()
        self._text = ""
        self._place = 0
        self._ended = False

    def skip(self, letters: str) -> str:
        """Pass over ``letters``; return the one that stands behind them, "" at the end."""
        while True:
            while self._place < len(self._text):
                if self._text[self._place] not in letters:
                    return self._text[self._place]
                self._place += 1
            if not self._more():
                return ""

    def take(self, count: int) -> None:
        """Pass over so many letters."""
        self._place += count

    def element(self, number: int) -> str:
        """Return the next value as it is written; raise ``BrokenArray``."""
        while True:
            try:
                _, end = self._scanner.raw_decode(self._text, self._place)
            except RecursionError:
                raise BrokenArray(f"element {number + 1} is nested too deeply") from None
            except json.JSONDecodeError as error:
                if not error.msg.startswith(_OPEN_STRING) and error.pos < len(self._text) - _LONGEST_WORD:
                    raise BrokenArray(f"the array is broken at its element {number + 1}") from None
                end = len(self._text)
            except ValueError:
                raise BrokenArray(f"element {number + 1} holds a number with too many digits") from None
            if self._text[end : end + 1] in _AFTER:  # else a number could go on
                found = self._text[self._place : end]
                self._place = end
                return found
            if len(self._text) - self._place > MAX_LINE:
                raise BrokenArray(f"element {number + 1} has no end within {MAX_LINE:,} characters")
            # Twice as much each time, so that a long element is not scanned over and over.
            if not self._more(len(self._text) - self._place):
                raise BrokenArray(f"the array is cut or broken at its element {number + 1}")

    def _more(self, least: int = 1) -> bool:
        """Read on; return False where nothing is left."""
        pieces, size = [self._text[self._place :]], 0
        while size < max(least, 1) and not self._ended:
            chunk = next(self._chunks, None)
            self._ended = chunk is None
            pieces.append(self._decoder.decode(chunk or b"", final=self._ended))
            size += len(pieces[-1])
        self._text, self._place = "".join(pieces), 0
        return size > 0
