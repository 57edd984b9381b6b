"""Records: what is read from a line, and the reason why one is not."""

import json
from typing import Any

import pytest

from packhouse.worker.forms import chat_of_form
from packhouse.worker.records import BadRecord, Chat, lines, parse, text_of

SECRET = "hunter2"


def chat_of(record: dict[str, Any], name: str) -> Chat:
    return chat_of_form(record, "messages", {"messages": name, "tools": "tools"})


def refused(line: bytes, field: str = "text", kind: str = "text") -> BadRecord:
    read = text_of if kind == "text" else chat_of
    with pytest.raises(BadRecord) as caught:
        read(parse(line), field)
    return caught.value


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "hunter2"', "invalid_json"),
        (b'{"text": hunter2}', "invalid_json"),
        (b'{"text": "hunter2\x01"}', "invalid_json"),
        (b'{"text": "hunter2\\q"}', "invalid_json"),
        (b'{"text": "hunter2"} {"text": "b"}', "invalid_json"),
        (b'{"text": "hunter2", "n": NaN}', "invalid_json"),
        (b'{"text": "hunter2", "n": -Infinity}', "invalid_json"),
        (b'{"text": "hunter2\\ud800"}', "invalid_json"),
        (b'{"text": "hunter2", "n": ' + b"[" * 5_000 + b"]" * 5_000 + b"}", "invalid_json"),
        (b'{"text": "hunter2\xff"}', "invalid_utf8"),
        (b'{"text": "hunter2\xed\xa0\x80"}', "invalid_utf8"),
        (b'"hunter2"', "not_an_object"),
        (b'["hunter2"]', "not_an_object"),
        (b"null", "not_an_object"),
        (b"17", "not_an_object"),
        (b'{"body": "hunter2"}', "missing_field"),
        (b'{"text": ["hunter2"]}', "wrong_type"),
        (b'{"text": {"hunter2": 1}}', "wrong_type"),
        (b'{"text": null}', "wrong_type"),
        (b'{"text": 3}', "wrong_type"),
        (b'{"text": true}', "wrong_type"),
    ],
)
def test_a_bad_text_record_has_a_reason_and_shows_no_content(line: bytes, reason: str) -> None:
    error = refused(line)
    assert error.reason == reason
    assert error.detail
    assert SECRET not in error.detail


def test_the_detail_of_a_missing_field_names_the_fields_there_are() -> None:
    assert refused(b'{"question": "q", "answer": "a"}').detail == "no field 'text'; there are 'answer', 'question'"
    assert refused(b"{}").detail == "no field 'text'; there are none"


def message(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "q"}, fields]}).encode()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"messages": "hunter2"}', "wrong_type"),
        (b'{"messages": {"role": "user"}}', "wrong_type"),
        (b'{"messages": []}', "empty"),
        (b'{"messages": ["hunter2"]}', "wrong_type"),
        (b'{"conversations": []}', "missing_field"),
        (message(content=SECRET), "missing_field"),
        (message(role=7, content=SECRET), "missing_field"),
        (message(role="assistant"), "wrong_type"),
        (message(role="assistant", content=None), "wrong_type"),
        (message(role="assistant", content=7), "wrong_type"),
        (message(role="assistant", content={"text": SECRET}), "wrong_type"),
        (message(role="assistant", content=[{"type": SECRET, "text": SECRET}]), "unsupported"),
        (message(role="assistant", content=[{"type": "image_url", "value": SECRET}]), "unsupported"),
        (message(role="assistant", content=[SECRET]), "unsupported"),
        (message(role="assistant", content=[{"type": "text"}]), "unsupported"),
        (message(role="assistant", content=[{"type": "tool_call", "text": "{hunter2"}]), "invalid_json"),
        (message(role="assistant", content=[{"type": "tool_call", "text": '"\\ud800"'}]), "invalid_json"),
        (message(role="assistant", content=[{"type": "tool_call", "text": '{"a": NaN}'}]), "invalid_json"),
        (message(role="assistant", content=[{"type": "tool_call", "text": "[" * 100_000}]), "invalid_json"),
        (message(role="assistant", content="", tool_calls=SECRET), "wrong_type"),
        (message(role="assistant", content="", tool_calls=[SECRET]), "wrong_type"),
        (message(role="assistant", content="a", weight=SECRET), "wrong_type"),
        (message(role=SECRET, content="a", weight=1), "unsupported"),
        (b'{"messages": [{"role": "user", "content": "q"}], "tools": "hunter2"}', "invalid_json"),
        (b'{"messages": [{"role": "user", "content": "q"}], "tools": {"hunter2": 1}}', "wrong_type"),
        (b'{"messages": [{"role": "user", "content": "q"}], "tools": ["hunter2"]}', "wrong_type"),
    ],
)
def test_a_bad_chat_record_has_a_reason_and_shows_no_content(line: bytes, reason: str) -> None:
    error = refused(line, "messages", "chat")
    assert error.reason == reason
    assert SECRET not in error.detail


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'\xef\xbb\xbf{"a"}\n{"b"}\n', [(0, 3, b'{"a"}'), (1, 9, b'{"b"}')]),
        (b"a\n\n   \nb\nc", [(0, 0, b"a"), (3, 7, b"b"), (4, 9, b"c")]),
        (b"a\r\n\r\nb\r\n", [(0, 0, b"a\r"), (2, 5, b"b\r")]),
        (b"a\n\xef\xbb\xbfb\n", [(0, 0, b"a"), (1, 5, b"b")]),
        (b"\xef\xbb\xbf\n", []),
        (b"", []),
    ],
)
def test_lines_are_numbered_and_placed(data: bytes, expected: list[tuple[int, int, bytes]]) -> None:
    found = list(lines(data))
    assert [(line.row, line.offset, line.data) for line in found] == expected
    assert all(data[line.offset :].startswith(line.data) for line in found)


def test_a_line_end_with_a_carriage_return_is_white_space() -> None:
    assert [text_of(parse(line.data), "text") for line in lines(b'{"text":"a"}\r\n{"text":"b"}\r')] == ["a", "b"]


def test_text_is_kept_as_it_stands() -> None:
    values = ["2024-01-02", "2024-01-02T03:04:05Z", "1e5", "", " \n\t", "a\u0000b", "\u2028", "😀", "\ufeffx"]
    for value in values:
        assert text_of(parse(json.dumps({"text": value}).encode()), "text") == value


def test_a_line_of_three_million_characters_is_read() -> None:
    assert len(text_of(parse(b'{"text": "' + b"a" * 3_000_000 + b'"}'), "text")) == 3_000_000


def test_a_line_past_the_limit_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packhouse.worker.records.MAX_RECORD", 10)
    assert refused(b"not even JSON").reason == "too_large"


def test_typed_parts_become_the_fields_that_templates_read() -> None:
    parts = [
        {"type": "reasoning", "value": "hm"},
        {"type": "text", "text": "Sun"},
        {"type": "text", "value": "ny"},
        {"type": "tool_call", "value": '{"name": "f", "arguments": {"d": "2025-08-01", "n": 3}}'},
    ]
    chat = chat_of({"messages": [{"role": "assistant", "content": parts}]}, "messages")
    assert chat.messages == [
        {
            "role": "assistant",
            "content": "Sunny",
            "thinking": "hm",
            "reasoning_content": "hm",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"d": "2025-08-01", "n": 3}}}],
        }
    ]


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_found_under_each_of_its_names(name: str) -> None:
    (message,) = chat_of({"m": [{"role": "assistant", "content": "a", name: "hm"}]}, "m").messages
    assert (message["reasoning_content"], message["thinking"]) == ("hm", "hm")


def test_nulls_are_as_if_they_were_not_there() -> None:
    record: dict[str, Any] = {
        "m": [{"role": "assistant", "content": None, "tool_calls": [{"function": {}}], "name": None}],
        "tools": None,
    }
    chat = chat_of(record, "m")
    assert chat.messages == [{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}]
    assert chat.tools is None


@pytest.mark.parametrize("weight", [0.5, 2, -1])
def test_a_weight_that_is_neither_nought_nor_one_is_refused(weight: float) -> None:
    with pytest.raises(BadRecord) as refusal:
        chat_of({"m": [{"role": "assistant", "content": "a", "loss_weight": weight}]}, "m")
    assert refusal.value.reason == "unsupported"
    assert "0 nor 1" in refusal.value.detail


def test_rows_keep_their_own_keys_and_types() -> None:
    """No reader unifies them: a row gains no key, and a date stays text beside a number."""
    rows = [{"city": "X", "t": "2025-08-01"}, {"n": 3, "t": 1690876800}, {"big": 2**80, "f": 1.0}]
    for arguments in rows:
        line = json.dumps({"m": [{"role": "assistant", "content": "", "tool_calls": [{"arguments": arguments}]}]})
        assert json.dumps(chat_of(parse(line.encode()), "m").messages[0]["tool_calls"][0]["arguments"]) == json.dumps(
            arguments
        )


@pytest.mark.parametrize(
    ("fields", "trained"),
    [
        ({}, True),
        ({"weight": 0}, False),
        ({"weight": 1}, True),
        ({"loss_weight": 0.0}, False),
        ({"loss": False}, False),
        ({"loss": True}, True),
        ({"loss": None}, True),
    ],
)
def test_a_zero_weight_keeps_a_message_untrained_and_never_shows(fields: dict[str, Any], trained: bool) -> None:
    record: dict[str, Any] = {
        "m": [{"role": "user", "content": "q", "weight": 0}, {"role": "assistant", "content": "a", **fields}]
    }
    chat = chat_of(record, "m")
    assert chat.trained == [trained]
    assert chat.messages[1] == {"role": "assistant", "content": "a"}


@pytest.mark.parametrize("tools", [[], "", None, "[]"])
def test_no_tools_are_none(tools: Any) -> None:
    assert chat_of({"m": [{"role": "user", "content": "q"}], "tools": tools}, "m").tools is None


def test_tools_come_as_a_list_or_as_text() -> None:
    tool = {"name": "f", "description": "查<天>&'q'"}
    for tools in ([tool], json.dumps([tool])):
        assert chat_of({"m": [{"role": "user", "content": "q"}], "tools": tools}, "m").tools == [tool]


def test_strings_are_all_that_could_show() -> None:
    call = {"function": {"name": "f", "arguments": {"k": ["deep"]}}}
    record = {"m": [{"role": "r", "content": "c", "tool_calls": [call]}], "tools": [{"name": "t"}]}
    assert {"r", "c", "f", "k", "deep", "t"} <= set(chat_of(record, "m").strings())
