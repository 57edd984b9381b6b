"""Forms of records: recognised by their fields, and read to chats, texts and ids."""

import json
from pathlib import Path
from typing import Any

import pytest

from packhouse.client.errors import InvalidRequest
from packhouse.client.wire import Form, JobSpec
from packhouse.worker.forms import chat_of_form, field_names, recognise, recognise_all, text_of_form, tokens_of
from packhouse.worker.loss import trained
from packhouse.worker.recipe import resolve
from packhouse.worker.records import BadRecord, Chat

ASKED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def turns(chat: Chat) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in chat.messages]


def read(record: dict[str, Any], form: Form, **fields: str) -> Chat:
    return chat_of_form(record, form, field_names(form, fields))


@pytest.mark.parametrize(
    ("record", "form"),
    [
        ({"messages": ASKED, "text": "x"}, "messages"),
        ({"conversations": [], "tools": ""}, "conversations"),
        ({"instruction": "i", "input": "", "output": "o"}, "instruction"),
        ({"prompt": "p", "completion": "c"}, "completion"),
        ({"question": "q", "answer": "a"}, "completion"),
        ({"input_ids": [1]}, "tokens"),
        ({"text": "t"}, "text"),
        ({"content": "t", "id": 7}, "text"),
        ({"content": ["t"]}, None),
        ({"body": "t"}, None),
        ({}, None),
    ],
)
def test_a_form_is_known_by_its_fields(record: dict[str, Any], form: Form | None) -> None:
    found = recognise(record)
    assert (found and found[0]) == form


def test_the_first_records_must_agree() -> None:
    text, chat = {"text": "t"}, {"messages": ASKED}
    assert recognise_all([{}, text, {"odd": 1}, text]) == ("text", {"text": "text"})
    assert recognise_all([{"odd": 1}]) is None
    with pytest.raises(InvalidRequest, match=r"both 'text' and 'messages': state the one that all have as 'format'"):
        recognise_all([text, chat])


def test_a_field_that_a_form_has_not_cannot_be_mapped() -> None:
    with pytest.raises(InvalidRequest, match=r"no field 'completion' .*: map one of 'text'"):
        field_names("text", {"completion": "x"})


def test_b095_both_layouts_of_conversations_are_the_same_chat() -> None:
    old = [{"from": "system", "value": "sys"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    new = [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    expected = [("system", "sys"), ("user", "a"), ("assistant", "b")]
    for items in (old, new):
        assert turns(read({"conversations": items}, "conversations")) == expected
    assert turns(read({"messages": new}, "messages")) == expected
    assert turns(read({"conversations": old[1:], "system": "sys"}, "conversations")) == expected


def test_tool_roles_of_conversations_become_calls_and_answers() -> None:
    call = '{"name": "f", "arguments": {"d": "2025-08-01"}}'
    items = [("human", "q"), ("function_call", call), ("observation", '{"t": 3}'), ("gpt", "Three.")]
    record = {"conversations": [{"from": who, "value": what} for who, what in items], "tools": '[{"name": "f"}]'}
    chat = read(record, "conversations")
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool", "assistant"]
    function = {"name": "f", "arguments": {"d": "2025-08-01"}}
    assert chat.messages[1]["tool_calls"] == [{"type": "function", "function": function}]
    assert (chat.messages[2]["content"], chat.tools, chat.trained) == ('{"t": 3}', [{"name": "f"}], [True, True])


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"from": "stranger", "value": "hunter2"}, "unsupported"),
        ({"from": 7, "value": "hunter2"}, "unsupported"),
        ({"from": "gpt"}, "wrong_type"),
        ({"from": "function_call", "value": "hunter2"}, "invalid_json"),
        ({"from": "function_call", "value": {"name": "hunter2"}}, "wrong_type"),
        ({"from": "function_call", "value": '["hunter2"]'}, "wrong_type"),
    ],
)
def test_a_turn_that_cannot_be_used_has_a_reason_and_shows_no_content(turn: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRecord) as caught:
        read({"conversations": [turn]}, "conversations")
    assert caught.value.reason == reason
    assert "hunter2" not in caught.value.detail


def test_an_instruction_has_an_input_a_history_and_a_system() -> None:
    record = {"instruction": "do", "input": "this", "output": "done", "history": [["q", "a"]], "system": "s"}
    expected = [("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "do\nthis"), ("assistant", "done")]
    assert turns(read(record, "instruction")) == expected
    assert turns(read({"instruction": "do", "input": "", "output": "o"}, "instruction"))[0] == ("user", "do")
    assert text_of_form(record, "instruction", field_names("instruction", {})) == ("do\nthisdone", [(7, 11)])


def test_a_prompt_and_its_completion() -> None:
    names = {"prompt": "question", "completion": "answer"}
    assert turns(read({"question": "q", "answer": "a"}, "completion", **names)) == [("user", "q"), ("assistant", "a")]
    record = {
        "prompt": [*ASKED, {"role": "user", "content": "q2"}],
        "completion": [{"role": "assistant", "content": "b"}],
    }
    assert read(record, "completion").trained == [False, True]
    assert text_of_form({"prompt": "é ", "completion": "a"}, "completion", field_names("completion", {})) == (
        "é a",
        [(2, 3)],
    )


@pytest.mark.parametrize(
    ("record", "ids", "mask"),
    [
        ({"input_ids": [1, 5, 0]}, [1, 5, 0], [1, 1, 1]),
        ({"input_ids": [1, -5, 0, -6, 7, 0]}, [1, 5, 0, 6, 7, 0], [1, 0, 0, 0, 1, 1]),
        ({"input_ids": [0, -5]}, [0, 5], [1, 0]),
        ({"input_ids": [0, 5], "labels": [-100, 5]}, [0, 5], [0, 1]),
        ({"input_ids": [0, 5], "labels": [0, -100]}, [0, 5], [1, 0]),
        ({"input_ids": [0, 5], "loss_mask": [True, False]}, [0, 5], [1, 0]),
        ({"input_ids": []}, [], []),
    ],
)
def test_ids_come_with_a_mask_or_with_signs_and_zero_is_an_id(
    record: dict[str, Any], ids: list[int], mask: list[int]
) -> None:
    made = tokens_of(record, field_names("tokens", {}), 8)
    assert (made.ids.tolist(), made.trained.astype(int).tolist()) == (ids, mask)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({}, "missing_field"),
        ({"input_ids": "1 2"}, "wrong_type"),
        ({"input_ids": [1, 2.0]}, "wrong_type"),
        ({"input_ids": [8]}, "bad_tokens"),
        ({"input_ids": [-8]}, "bad_tokens"),
        ({"input_ids": [2**70]}, "bad_tokens"),
        ({"input_ids": [1, -(2**63)]}, "bad_tokens"),
        ({"input_ids": [True, 1]}, "wrong_type"),
        ({"input_ids": [1, 2], "labels": [1]}, "bad_tokens"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "bad_tokens"),
        ({"input_ids": [1], "loss_mask": [2]}, "bad_tokens"),
        ({"input_ids": [-1], "loss_mask": [1]}, "bad_tokens"),
        ({"input_ids": [1], "loss_mask": [1], "labels": [1]}, "bad_tokens"),
    ],
)
def test_ids_that_cannot_be_right_are_refused(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRecord) as caught:
        tokens_of(record, field_names("tokens", {}), 8)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("roles", "rule", "expected"),
    [
        ("uaua", "assistant", [True, True]),
        ("uaua", "last_turn", [False, True]),
        ("uaua", "completion", [False, True]),
        ("uauata", "last_turn", [False, True, True]),
        ("uauata", "completion", [False, False, True]),
        ("uaua u", "last_turn", [False, True]),
        ("aa", "last_turn", [True, True]),
        ("u", "last_turn", []),
    ],
)
def test_b097_a_rule_says_which_answers_are_trained(roles: str, rule: str, expected: list[bool]) -> None:
    names = {"u": "user", "a": "assistant", "t": "tool"}
    chat = read(
        {"m": [{"role": names[one], "content": "x"} for one in roles if one in names]}, "messages", messages="m"
    )
    assert trained(chat, rule) == expected


@pytest.mark.parametrize("rule", ["assistant", "last_turn", "completion"])
def test_what_a_message_says_goes_before_the_rule(rule: str) -> None:
    turns = [("user", None), ("assistant", 1), ("user", None), ("assistant", 0)]
    chat = read({"m": [{"role": role, "content": "x", "loss": loss} for role, loss in turns]}, "messages", messages="m")
    assert trained(chat, rule) == [True, False]


@pytest.mark.parametrize(
    ("job", "first", "form", "kind", "loss"),
    [
        ({}, [{"text": "t"}], "text", "text", "all"),
        ({}, [{"messages": ASKED}], "messages", "chat", "assistant"),
        ({}, [{"odd": 1}], "text", "text", "all"),
        ({"kind": "chat"}, [{"conversations": []}], "conversations", "chat", "assistant"),
        ({"kind": "chat"}, [{"text": "t"}], "messages", "chat", "assistant"),
        ({"kind": "text"}, [{"prompt": "p", "completion": "c"}], "completion", "text", "completion"),
        ({"format": "instruction"}, [], "instruction", "chat", "assistant"),
        ({"format": "tokens"}, [], "tokens", "tokens", "given"),
        ({"format": "tokens", "loss": "all"}, [], "tokens", "tokens", "all"),
        ({"text_field": "body"}, [{"body": "t"}], "text", "text", "all"),
        (
            {"fields": {"prompt": "ask", "completion": "reply"}},
            [{"ask": 1, "reply": 2}],
            "completion",
            "chat",
            "assistant",
        ),
    ],
)
def test_a_recipe_goes_by_what_is_stated_and_else_by_the_records(
    job: dict[str, Any], first: list[Any], form: str, kind: str, loss: str, tiny: Path, memory_store: Any
) -> None:
    recipe = resolve(JobSpec(sources=["/x"], tokenizer=str(tiny), **job), memory_store(), first).recipe_
    assert (recipe.record, recipe.kind, recipe.loss) == (form, kind, loss)
    assert type(recipe).from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


@pytest.mark.parametrize(
    ("job", "match"),
    [
        ({"format": "text", "kind": "chat"}, "'text' do not become 'chat'"),
        ({"format": "tokens", "loss": "assistant"}, "does not fit kind 'tokens'"),
        ({"format": "text", "fields": {"prompt": "x"}}, "no field 'prompt'"),
    ],
)
def test_what_does_not_go_together_is_refused(job: dict[str, Any], match: str, tiny: Path, memory_store: Any) -> None:
    with pytest.raises(InvalidRequest, match=match):
        resolve(JobSpec(sources=["/x"], tokenizer=str(tiny), **job), memory_store())


def test_ids_are_kept_as_they_come_with_their_mask(toolkit: Any, rows: Any, tiny: Path) -> None:
    records = [{"input_ids": [0, -5, 7]}, {"input_ids": [-5]}, {"input_ids": [999]}, {"input_ids": [4, 0]}]
    made = rows(toolkit(tiny, format="tokens", max_length=2), records)
    assert (made.ids, made.masks) == ([[0, 5], [4, 0]], [[1, 0], [1, 1]])
    assert [(reject.row, reject.reason) for reject in made.rejects] == [(1, "nothing_to_train"), (2, "bad_tokens")]
    kept = rows(toolkit(tiny, format="tokens", loss="all", add_eos=True), records[:2])
    assert (kept.ids, kept.masks) == ([[0, 5, 7, 2], [5, 2]], None)


def test_a_prompt_and_completion_as_text_trains_the_completion(toolkit: Any, rows: Any, tiny: Path) -> None:
    made = rows(toolkit(tiny, format="completion", kind="text"), [{"prompt": "x ", "completion": "yz"}])
    assert (made.ids, made.trained) == ([[92, 225, 93, 94, 2]], [[93, 94, 2]])
