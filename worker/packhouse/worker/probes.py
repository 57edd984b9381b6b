"""The probe set: texts on which two encoding engines are most likely to differ."""

from collections.abc import Sequence

_CLASSES = (
    "a",
    "Z",
    "é",
    "1",
    ".",
    "'",
    "_",
    "-",
    "#",
    "я",
    "ب",
    "ह",
    "ก",
    "你",
    "あ",
    "한",
    "😀",
    "ß",
    "\u0301",
    "\u200d",
)
_SPACES = ("", " ", "  ", "   ", "    ", "\t", "\t\t", "\n", "\n\n", " \n", "\n ", "\r\n", "\u00a0", "\u3000", "\u2028")
_PHRASES = (
    "",
    "It's we'll I'M you'RE they'd 'tis rock'n'roll",
    "0 12 345 6789 12345678901234567890 1,234.56 1e-9 0x1F",
    "https://example.org/a_b?c=d&e=%20#f user@example.org",
    "def f(x):\n\treturn x**2  # ok\n\n\n",
    '{"k": [1, null]}',
    "\x00\x01\x1f\x7f\x85",
    "e\u0301 \u1100\u1161 Å ﬁ ①",
    "👩‍👩‍👧‍👦🏳️‍🌈🇩🇪",
    "\ufeffx",
    "\ufffd\ufffe",
    "...!!!???---===///\\\\",
    "a" * 300,
    " " * 200 + "x",
    "ab" * 200,
    "\n" * 80,
    "你好世界，這是測試。",
    "สวัสดีชาวโลก",
    "Привет, мир!",
    "مرحبا بالعالم",
    "<|im_start|>",
    "</s><s>",
    "<unk>",
    "<0x0A>",
    "▁",
    "Ġ",
    "camelCaseHTTPServer2Go",
    "LaTeX: $\\alpha_{i}^2$",
)


def probes(added_tokens: Sequence[str]) -> list[str]:
    """Return texts that tell engines apart: every run of white space between every two classes of characters, scripts,
    digits, marks, controls, long runs, and added tokens with neighbours."""
    pairs = [a + space + b for space in _SPACES for a in _CLASSES for b in _CLASSES]
    edges = [space + letter for space in _SPACES for letter in _CLASSES] + [
        a + space for space in _SPACES for a in _CLASSES
    ]
    tokens = [around.format(token) for token in added_tokens[:200] for around in ("{}", " {} ", "x{}y", "{0}{0}\n")]
    return [*_PHRASES, *pairs, *edges, *tokens]
