"""The forms that records come in: recognised by their fields, and read to chats, to texts or to ids."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from packhouse.client.errors import InvalidRequest
from packhouse.client.wire import Form
from packhouse.worker.records import BadRecord, Chat, chat_from, kind_of, list_of, loads, names_of, text_of

Span = tuple[int, int]

NEEDED: dict[Form, dict[str, tuple[str, ...]]] = {
    "messages": {"messages": ("messages", "dialogs")},
    "conversations": {"conversations": ("conversations", "conversation")},
    "instruction": {"instruction": ("instruction",), "output": ("output", "response")},
    "completion": {
        "prompt": ("prompt", "question", "query"),
        "completion": ("completion", "response", "answer"),
    },
    "tokens": {"input_ids": ("input_ids", "tokens", "ids")},
    "text": {"text": ("text", "content")},
}
"""The fields that a form must have, each with the names it is known by, in the order in which forms are tried."""

OPTIONAL: dict[Form, tuple[str, ...]] = {
    "messages": ("tools",),
    "conversations": ("tools", "system"),
    "instruction": ("input", "history", "system"),
    "completion": ("system",),
    "tokens": ("labels", "loss_mask"),
    "text": (),
}

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "function_call": "function_call",
    "tool_call": "function_call",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "tool": "tool",
}
"""What the speakers of conversations are called, and the role that each has."""

Fields = Mapping[str, str]


def recognise(record: Mapping[str, Any]) -> tuple[Form, dict[str, str]] | None:
    """Return the form of a record and the names that its fields have in it, or None."""
    for form, needed in NEEDED.items():
        found = {field: next((name for name in names if name in record), "") for field, names in needed.items()}
        if all(found.values()) and (form != "text" or isinstance(record[found["text"]], str)):
            return form, found
    return None


def recognise_all(records: Iterable[Mapping[str, Any]]) -> tuple[Form, dict[str, str]] | None:
    """Return the form that the records have in common, or None where none has any; raise ``InvalidRequest``."""
    found = [one for record in records if (one := recognise(record)) is not None]
    if found and any(one != found[0] for one in found):
        first, second = found[0][0], next(one[0] for one in found if one != found[0])
        how = f"both {first!r} and {second!r}" if first != second else f"{first!r} under two names"
        raise InvalidRequest(f"the first records have the form {how}", "state the one that all have as 'format'")
    return found[0] if found else None


def field_names(form: Form, given: Fields) -> dict[str, str]:
    """Return the names of all fields of a form in its records; raise ``InvalidRequest`` for a field it has not."""
    names = {field: known[0] for field, known in NEEDED[form].items()} | {name: name for name in OPTIONAL[form]}
    if unknown := sorted(set(given) - set(names)):
        detail = f"records of the form {form!r} have no field {unknown[0]!r} that could be mapped"
        raise InvalidRequest(detail, "map one of " + ", ".join(repr(name) for name in names))
    return names | dict(given)


def chat_of_form(record: dict[str, Any], form: Form, fields: Fields) -> Chat:
    """Return the conversation that a record holds; raise ``BadRecord``."""
    if form == "messages":
        return chat_from(list_of(record, fields["messages"]), record.get(fields["tools"]))
    if form == "conversations":
        items = list_of(record, fields["conversations"])
        turns = [_turn(item, index) for index, item in enumerate(items)]
        return chat_from(_system(record, fields) + turns, record.get(fields["tools"]))
    if form == "instruction":
        return chat_from([*_system(record, fields), *_history(record, fields), *_instruction(record, fields)], None)
    return _completion(record, fields)


def text_of_form(record: dict[str, Any], form: Form, fields: Fields) -> tuple[str, list[Span] | None]:
    """Return the text that a record holds, and the characters of its answer where it has one; raise ``BadRecord``."""
    if form == "text":
        return text_of(record, fields["text"]), None
    if form == "completion":
        prompt = text_of(record, fields["prompt"])
        answer = text_of(record, fields["completion"])
    else:
        prompt, answer = _prompt(record, fields), text_of(record, fields["output"])
    return prompt + answer, [(len(prompt), len(prompt) + len(answer))]


def _system(record: dict[str, Any], fields: Fields) -> list[Any]:
    system = record.get(fields["system"])
    return [{"role": "system", "content": system}] if system else []


def _turn(item: Any, index: int) -> Any:
    """Turn one entry of conversations, which may have the layout of messages, into a message."""
    if not isinstance(item, dict) or "from" not in item:
        return item
    rest = {name: value for name, value in item.items() if name not in ("from", "value")}
    speaker, value = item["from"], item.get("value")
    role = ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise BadRecord("unsupported", f"message {index} is from a speaker that is not known")
    if role != "function_call":
        return {**rest, "role": role, "content": value}
    if not isinstance(value, str):
        raise BadRecord("wrong_type", f"the function call of message {index} is {kind_of(value)}, not a string")
    calls = loads(value, f"the function call of message {index}")
    functions = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(one, dict) for one in functions):
        raise BadRecord("wrong_type", f"the function call of message {index} is not an object")
    calls = [{"type": "function", "function": one} for one in functions]
    return {**rest, "role": "assistant", "content": "", "tool_calls": calls}


def _prompt(record: dict[str, Any], fields: Fields) -> str:
    more = record.get(fields["input"])
    if more is not None and not isinstance(more, str):
        raise BadRecord("wrong_type", f"field {fields['input']!r} is {kind_of(more)}, not a string")
    instruction = text_of(record, fields["instruction"])
    return f"{instruction}\n{more}" if more else instruction


def _instruction(record: dict[str, Any], fields: Fields) -> list[Any]:
    return _exchange(_prompt(record, fields), text_of(record, fields["output"]))


def _exchange(question: Any, answer: Any) -> list[Any]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _history(record: dict[str, Any], fields: Fields) -> list[Any]:
    history = record.get(fields["history"]) or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise BadRecord("wrong_type", f"field {fields['history']!r} is not a list of pairs")
    return [message for pair in history for message in _exchange(*pair)]


def _completion(record: dict[str, Any], fields: Fields) -> Chat:
    """Return a prompt and its completion as a chat; both may be lists of messages. The prompt is not trained."""
    missing = [fields[name] for name in ("prompt", "completion") if fields[name] not in record]
    if missing:
        raise BadRecord("missing_field", f"no field {missing[0]!r}; there are {names_of(record)}")
    prompt, answer = record[fields["prompt"]], record[fields["completion"]]
    before = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    behind = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
    chat = chat_from([*_system(record, fields), *before, *behind], record.get("tools"))
    earlier = sum(isinstance(item, dict) and item.get("role") == "assistant" for item in before)
    stated = [False if one is None and place < earlier else one for place, one in enumerate(chat.stated)]
    return replace(chat, stated=stated, trained=[one is not False for one in stated])


@dataclass(frozen=True, slots=True)
class Tokens:
    """A record that comes as ids."""

    ids: np.ndarray[tuple[int], np.dtype[np.uint32]]
    trained: np.ndarray[tuple[int], np.dtype[np.bool_]]


def tokens_of(record: dict[str, Any], fields: Fields, vocab_size: int) -> Tokens:
    """Return the ids of a record and which are trained; raise ``BadRecord``.

    What is trained stands in a field of labels (-100 where not), in one of zeros and ones, or in the ids' signs, as
    InternEvo writes them: below zero where not. There a zero has no sign: it is trained where what it follows is.
    """
    signed = _integers(record, fields, "input_ids")
    ids = np.abs(signed).view(np.uint64)  # of the lowest of int64 too
    if len(ids) and int(ids.max()) >= vocab_size:
        raise BadRecord("bad_tokens", f"id {int(ids.max())} is not below {vocab_size}, the size of the vocabulary")
    marks = [name for name in ("labels", "loss_mask") if record.get(fields[name]) is not None]
    if len(marks) > 1 or (marks and bool((signed < 0).any())):
        raise BadRecord("bad_tokens", "it says twice which tokens are trained")
    if not marks:
        return Tokens(ids.astype(np.uint32), _of_signs(signed))
    values = _integers(record, fields, marks[0])
    if len(values) != len(ids):
        raise BadRecord("bad_tokens", f"{len(ids)} ids, and {len(values)} values in field {fields[marks[0]]!r}")
    trained = values != -100 if marks[0] == "labels" else values != 0
    if marks[0] == "labels" and not np.array_equal(values[trained], ids[trained]):
        raise BadRecord("bad_tokens", "a label is neither -100 nor the id at its place")
    if marks[0] == "loss_mask" and not bool(np.isin(values, (0, 1)).all()):
        raise BadRecord("bad_tokens", f"field {fields[marks[0]]!r} holds more than zeros and ones")
    return Tokens(ids.astype(np.uint32), trained)


def _integers(record: dict[str, Any], fields: Fields, field: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    name = fields[field]
    if name not in record:
        raise BadRecord("missing_field", f"no field {name!r}; there are {names_of(record)}")
    value: Sequence[Any] = record[name]
    kinds = (int, bool) if field == "loss_mask" else (int,)
    if not isinstance(value, list) or not all(type(one) in kinds for one in value):
        raise BadRecord("wrong_type", f"field {name!r} is not a list of integers")
    try:
        made: np.ndarray[tuple[int], np.dtype[np.int64]] = np.array(value, np.int64)
    except OverflowError:
        raise BadRecord("bad_tokens", f"field {name!r} holds a number beyond 64 bits") from None
    return made


def _of_signs(signed: np.ndarray[tuple[int], np.dtype[np.int64]]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    place = np.where(signed != 0, np.arange(len(signed)), -1)
    before = np.maximum.accumulate(place) if len(place) else place
    return np.where(before >= 0, signed[np.maximum(before, 0)] > 0, True)
