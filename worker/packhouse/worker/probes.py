"""The probe sets: texts on which two encoding engines, and chats on which two renderers, are most likely to differ."""

from collections.abc import Sequence
from typing import Any

from packhouse.worker.records import Chat

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
# Every kind of JSON value: the two renderers write some of them differently when a template prints them as they are.
_VALUES: dict[str, Any] = {
    "yes": True,
    "no": False,
    "null": None,
    "zero": 0,
    "negative": -7,
    "large": 2**63,
    "float": 1.0,
    "small": 1e-7,
    "great": 1e22,
    "list": [1, "a'b", None, True],
    "object": {"é": {"k": [2.5]}, "z": "", "a": '\n"\\'},
    "empty": {},
    "none": [],
    "text": 'tab\tquote\' "double" {{ x }}',
    "unseen": "\u200d\x7f\u2028",
}
_STRING_CALL = {"function": {"name": "f", "arguments": '{"a": 1}'}}
_ODD_CALL = {"id": "c1", "type": "function", "function": {"name": "odd", "arguments": _VALUES}}

CHATS: dict[str, Chat] = {
    "one turn": _chat(("user", "Hi"), ("assistant", "Hello.")),
    "system": _chat(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello.")),
    "two turns": _chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")),
    "prompt only": _chat(("user", "Hi")),
    "white space": _chat(("user", "  a \n\n"), ("assistant", "\n b\t \n"), ("user", ""), ("assistant", " ")),
    "line ends": _chat(("user", "a\x0bb\x0cc\x85d\u2028e\u2029f\r\ng"), ("assistant", "\x0bh\x85\u2028")),
    "letters": _chat(("user", "x'y ǆ ßΣ İ ŉ ªº ²①٣"), ("assistant", "ß")),
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
    "values": Chat(
        [
            {"role": "user", "content": "Odd?", "name": "Ann"},
            {"role": "assistant", "content": "x", "tool_calls": [_ODD_CALL]},
            {"role": "tool", "content": "5", "tool_call_id": "c1"},
            {"role": "assistant", "content": "Five."},
        ],
        [{"type": "function", "function": {"name": "odd", "strict": True, "parameters": _VALUES}}],
    ),
    "string arguments": Chat(
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [_STRING_CALL]},
        ],
    ),
    "assistant first": _chat(("assistant", "A"), ("user", "q")),
    "unknown role": _chat(("narrator", "x"), ("assistant", "y")),
}
