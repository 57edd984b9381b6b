"""Real data: ids, masks and lengths are transformers' own, whichever engine made them."""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from packhouse.worker.forms import NEEDED, chat_of_form, field_names, recognise
from packhouse.worker.sources import read, scan
from packhouse.worker.tokenize import Toolkit

KITS: dict[Any, Toolkit] = {}
TOKENIZERS = ["qwen3", "deepseek-v3", "mistral-spm"]

DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<｜Assistant｜>' }}[[{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<｜tool▁call▁begin｜>' + (c.function | tojson) }}{% endfor %}"
    "{{ '<｜end▁of▁sentence｜>' }}]]{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content }}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)
PLAIN = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ '\\n### ' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}[[{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}"
    "{% endfor %}{{ eos_token }}]]{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def _with_generation(qwen3: str) -> str:
    """Return Qwen3's own template with a generation tag around what follows the header of an assistant's turn."""
    header = "'<|im_start|>' + message.role + '\\n"
    edits = [
        (
            '{%- elif message.role == "assistant" %}\n',
            '{%- elif message.role == "assistant" %}\n{{- ' + header + "' }}{%- generation %}\n",
        ),
        (header + "<think>\\n'", "'<think>\\n'"),
        (header + "' + content", "content"),
        (
            "{{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\" %}",
            "{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}\n    {%- elif message.role == \"tool\" %}",
        ),
    ]
    for old, new in edits:
        assert old in qwen3
        qwen3 = qwen3.replace(old, new)
    return qwen3


def templates(name: str, tokenizer: Any) -> tuple[str, str]:
    """Return the template that a job is given, and the same with generation tags."""
    if name == "qwen3":
        return tokenizer.chat_template, _with_generation(tokenizer.chat_template)
    source = DEEPSEEK if name == "deepseek-v3" else PLAIN
    tags = source.replace("[[", "{% generation %}").replace("]]", "{% endgeneration %}")
    return source.replace("[[", "").replace("]]", ""), tags


@pytest.fixture
def kit(toolkit: Callable[..., Toolkit]) -> Callable[..., Toolkit]:
    """Return a function that gives a toolkit; its tokenizer is loaded and proven once for all tests."""

    def make(
        folder: Path, template: str | None = None, *, fast: bool = True, kind: str = "chat", **recipe: Any
    ) -> Toolkit:
        key = folder, template, fast, kind
        if key not in KITS:
            KITS[key] = toolkit(folder, fast=fast, kind=kind, template=template, add_eos=False)
        made = copy.copy(KITS[key])
        made.recipe = replace(made.recipe, **recipe)
        return made

    return make


@cache
def loaded(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def records_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def as_openai(record: dict[str, Any]) -> dict[str, Any]:
    """Turn typed parts into the fields that transformers' templates read."""
    messages = []
    for message in record["messages"]:
        parts = {
            kind: [p["value"] for p in message["content"] if p["type"] == kind]
            for kind in ("text", "reasoning", "tool_call")
        }
        made: dict[str, Any] = {"role": message["role"], "content": "".join(parts["text"])}
        if parts["reasoning"]:
            made["reasoning_content"] = "".join(parts["reasoning"])
        if parts["tool_call"]:
            made["tool_calls"] = [{"type": "function", "function": json.loads(call)} for call in parts["tool_call"]]
        messages.append(made)
    return {"messages": messages, "tools": json.loads(record["tools"]) if record.get("tools") else None}


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("file", "field"),
    [("sft/gsm8k_train.jsonl", "question"), ("sft/gsm8k_train.jsonl", "answer"), ("pretrain/c4_demo.jsonl", "text")],
)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts(name: str, file: str, field: str, fast: bool, shared: Path, kit: Any, rows: Any) -> None:
    folder, path = shared / "data" / "tokenizers" / name, shared / "data" / file
    truth = truth_of_texts(folder, path, field)
    made = rows(kit(folder, fast=fast, kind="text", field=field), path.read_bytes())
    assert made.ids == truth
    assert made.rejects == []
    assert made.samples.engine == ("gigatoken" if fast else "huggingface")
    assert (made.samples.audited > 0) == fast


@cache
def truth_of_texts(folder: Path, path: Path, field: str) -> list[list[int]]:
    texts = [record[field] for record in records_of(path)]
    ids: list[list[int]] = loaded(folder)(texts, add_special_tokens=False)["input_ids"]
    return ids


@cache
def truth_of_chats(folder: Path, path: Path, source: str) -> list[tuple[list[int], list[int]]]:
    options = {"chat_template": source, "return_dict": True, "return_assistant_tokens_mask": True}
    made = []
    for record in map(as_openai, records_of(path)):
        one = loaded(folder).apply_chat_template(record["messages"], tools=record["tools"], **options)
        made.append((one["input_ids"], one["assistant_masks"]))
    return made


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("file", ["v1_sft_demo.jsonl", "reason_tool_use_demo_50.jsonl"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_chats(name: str, file: str, fast: bool, shared: Path, kit: Any, rows: Any) -> None:
    folder, path = shared / "data" / "tokenizers" / name, shared / "data" / "sft" / file
    plain, marked = templates(name, loaded(folder))
    made = rows(kit(folder, plain, fast=fast), path.read_bytes())
    assert made.rejects == []
    truth = truth_of_chats(folder, path, marked)
    assert made.ids == [ids for ids, _ in truth]
    assert made.masks == [mask for _, mask in truth]
    assert all(any(mask) and not all(mask) for mask in made.masks)
    assert made.samples.engine == ("gigatoken" if fast else "huggingface")
    assert made.samples.fallbacks["renderer"] == (not fast)
    # and the text of the reference is that of the template without tags
    record = as_openai(records_of(path)[-1])
    text = loaded(folder).apply_chat_template(
        record["messages"], tools=record["tools"], chat_template=plain, return_dict=True
    )
    assert text["input_ids"] == truth[-1][0]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_lengths_and_masks_are_right_after_a_cut(name: str, shared: Path, kit: Any, rows: Any) -> None:
    folder, path = shared / "data" / "tokenizers" / name, shared / "data" / "sft" / "reason_tool_use_demo_50.jsonl"
    plain, marked = templates(name, loaded(folder))
    made = rows(kit(folder, plain, max_length=900, overflow="truncate"), path.read_bytes())
    truth = [(ids[:900], mask[:900]) for ids, mask in truth_of_chats(folder, path, marked)]
    assert list(zip(made.ids, made.masks, strict=True)) == [(ids, mask) for ids, mask in truth if any(mask)]
    assert [reject.row for reject in made.rejects] == [row for row, (_, mask) in enumerate(truth) if not any(mask)]
    assert {reject.reason for reject in made.rejects} <= {"nothing_to_train"}


def test_pictures_are_kept_out_with_a_reason(shared: Path, kit: Any, rows: Any) -> None:
    path = shared / "data" / "multimodal" / "v1_multimodal_demo.jsonl"
    made = rows(kit(shared / "data" / "tokenizers" / "qwen3", None), path.read_bytes())
    expected = [
        any(part["type"] != "text" for m in row["messages"] for part in m["content"]) for row in records_of(path)
    ]
    assert [reject.row for reject in made.rejects] == [row for row, odd in enumerate(expected) if odd]
    assert made.ids == []
    assert len(made.rejects) == len(expected) > 20
    assert {(reject.reason, "image_url" in reject.detail) for reject in made.rejects} == {("unsupported", True)}


def test_every_file_of_lines_is_looked_at(shared: Path) -> None:
    found = {path.name for path in (shared / "data").rglob("*.jsonl")}
    assert found == {
        "gsm8k_train.jsonl",
        "c4_demo.jsonl",
        "v1_sft_demo.jsonl",
        "reason_tool_use_demo_50.jsonl",
        "v1_multimodal_demo.jsonl",
    }


def test_the_qwen3_reference_is_independent_of_ours(shared: Path) -> None:
    """The tags are where the words say: decoded, the trained text is the answers and their ends."""
    tokenizer = loaded(shared / "data" / "tokenizers" / "qwen3")
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "one"}] * 2
    made: Callable[..., Any] = tokenizer.apply_chat_template
    marked = made(
        messages,
        chat_template=_with_generation(tokenizer.chat_template),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    trained = [token for token, bit in zip(marked["input_ids"], marked["assistant_masks"], strict=True) if bit]
    assert tokenizer.decode(trained) == "one<|im_end|><think>\n\n</think>\n\none<|im_end|>"


FILES = ["alpaca_en_demo.json", "alpaca_zh_demo.json", "glaive_toolcall_en_demo.json", "gsm8k_train.jsonl"]
"""Files of conversations that ``test_chats`` does not hold, since transformers cannot read their form."""


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_form_of_conversation_is_what_transformers_makes_of_it(
    name: str, file: str, shared: Path, kit: Any, rows: Any
) -> None:
    """All records go in; the ids and masks of some, spread over the file, are compared."""
    folder, path = shared / "data" / "tokenizers" / name, shared / "data" / "sft" / file
    plain, marked = templates(name, loaded(folder))
    records = json.loads(path.read_text()) if file.endswith(".json") else records_of(path)
    form, names = recognise(records[0]) or pytest.fail("no form")
    fields = field_names(form, names)
    usual = field_names(form, {})
    stated = tuple(sorted((field, one) for field, one in fields.items() if one != usual[field]))
    main = next(iter(NEEDED[form]))
    made = rows(kit(folder, plain, record=form, field=fields[main], fields=stated), records)
    assert (len(made.ids), made.rejects) == (len(records), [])
    assert made.samples.engine == "gigatoken"
    options: dict[str, Any] = {"chat_template": marked, "return_dict": True, "return_assistant_tokens_mask": True}
    for row in range(0, len(records), len(records) // 20):
        chat = chat_of_form(records[row], form, fields)
        truth = loaded(folder).apply_chat_template(chat.messages, tools=chat.tools, **options)
        assert (made.ids[row], made.masks[row]) == (truth["input_ids"], truth["assistant_masks"]), row


@pytest.mark.parametrize("documents", ["file", "paragraph"])
def test_documents_of_plain_text(documents: str, shared: Path, kit: Any, rows: Any) -> None:
    path, folder = shared / "data" / "pretrain" / "wiki_demo.txt", shared / "data" / "tokenizers" / "qwen3"
    text = path.read_text()
    parts = [part.strip("\r\n") for part in re.split(r"\n\s*\n", text) if part.strip()]
    made = rows(kit(folder, kind="text"), b"".join(read(block) for block in scan(str(path), documents)))
    assert made.ids == loaded(folder)([text] if documents == "file" else parts)["input_ids"]
