"""Built-in templates: what they write, that they are proven, and that every file of the shared data goes in by them."""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from packhouse.client.errors import InvalidRequest
from packhouse.client.wire import JobSpec
from packhouse.worker.builtin_templates import BUILT_IN
from packhouse.worker.forms import chat_of_form, field_names, recognise
from packhouse.worker.recipe import resolve
from packhouse.worker.records import chat_from
from packhouse.worker.render import ChatTemplate
from packhouse.worker.tokenize import Toolkit

KITS: dict[str, Toolkit] = {}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [("system", "s"), ("user", " q "), ("assistant", "a\n")]
FILES = [
    "gsm8k_train.jsonl",
    "alpaca_en_demo.json",
    "alpaca_zh_demo.json",
    "glaive_toolcall_en_demo.json",
    "v1_sft_demo.jsonl",
    "reason_tool_use_demo_50.jsonl",
]


def rendered(name: str, *turns: tuple[str, str]) -> str:
    template = ChatTemplate(BUILT_IN[name], SPECIAL)
    template.prove()
    assert template.fast is not None, template.reason
    return template.render(chat_from([{"role": role, "content": text} for role, text in turns], None))[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "internlm2",
            "<s><|im_start|>system\ns<|im_end|>\n<|im_start|>user\n q <|im_end|>\n"
            "<|im_start|>assistant\na\n<|im_end|>\n",
        ),
        (
            "chatml",
            "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n q <|im_end|>\n<|im_start|>assistant\na\n<|im_end|>\n",
        ),
        (
            "llama3",
            "<s><|start_header_id|>system<|end_header_id|>\n\ns<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nq"
            "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\na<|eot_id|>",
        ),
        ("deepseek", "<s>s<｜User｜> q <｜Assistant｜>a\n<｜end▁of▁sentence｜>"),
    ],
)
def test_what_a_template_writes(name: str, text: str) -> None:
    assert rendered(name, *TALK) == text


@cache
def sample(path: Path, count: int = 60) -> list[dict[str, Any]]:
    text = path.read_text()
    records = json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]
    return records[:count]


@cache
def loaded(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("file", FILES)
def test_qwen3_is_the_template_of_its_tokenizer(file: str, shared: Path) -> None:
    folder = shared / "data" / "tokenizers" / "qwen3"
    own = ChatTemplate(loaded(folder).chat_template, {})
    built_in = ChatTemplate(BUILT_IN["qwen3"], {})
    for record in sample(shared / "data" / "sft" / file):
        form, names = recognise(record) or pytest.fail("no form")
        chat = chat_of_form(record, form, field_names(form, names))
        assert built_in.render(chat)[0] == own.render(chat)[0]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    ("tokenizer", "template"), [("qwen3", None), ("deepseek-v3", "deepseek"), ("mistral-spm", "internlm2")]
)
def test_every_file_goes_in_as_it_is_and_what_is_trained_is_what_the_assistant_says(
    file: str, tokenizer: str, template: str | None, shared: Path, memory_store: Any, rows: Any
) -> None:
    folder, store = shared / "data" / "tokenizers" / tokenizer, memory_store()
    records = sample(shared / "data" / "sft" / file, 25)
    recipe = resolve(JobSpec(sources=["/x"], tokenizer=str(folder), template=template), store, records).recipe_
    if tokenizer not in KITS:  # it is loaded and proven once for all files
        KITS[tokenizer] = Toolkit.load(store, recipe)
    kit = copy.copy(KITS[tokenizer])
    kit.recipe = recipe
    made = rows(kit, records)
    assert (made.rejects, len(made.ids)) == ([], len(records))
    end = {"qwen3": "<|im_end|>", "deepseek-v3": "<｜end▁of▁sentence｜>", "mistral-spm": "<|im_end|>"}[tokenizer]
    decode = loaded(folder).decode
    for record, trained in zip(records, made.trained, strict=True):
        chat = chat_of_form(record, recipe.record, recipe.names)
        said = [message for message in chat.messages if message["role"] == "assistant"]
        turns = decode(trained).split(end)
        assert len(turns) == len(said) + 1
        for turn, message in zip(turns, said, strict=False):
            calls = [call["function"]["name"] for call in message.get("tool_calls", [])]
            assert message["content"].strip() in turn
            assert all(name in turn for name in calls)
            reasoning = message.get("reasoning_content", "") if tokenizer == "qwen3" else ""
            arguments = sum(len(json.dumps(call)) for call in message.get("tool_calls", []))
            assert len(turn) <= len(message["content"]) + len(reasoning) + arguments + 80 * (1 + len(calls))
        assert not turns[-1].strip()


def test_a_name_that_is_not_built_in_is_refused(tiny: Path, memory_store: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"no built-in template 'lama3': take one of 'internlm2', 'chatml'"):
        resolve(JobSpec(sources=["/x"], tokenizer=str(tiny), kind="chat", template="lama3"), memory_store())


def test_the_day_that_a_template_asks_for_is_pinned_and_stands_in_the_recipe(
    tiny: Path, toolkit: Any, rows: Any, chat: Any
) -> None:
    source = "{{ '[' + strftime_now('%d %b %Y') + ']' }}" + BUILT_IN["chatml"]
    made = [
        rows(toolkit(tiny, kind="chat", template=source, fast=fast, template_date=day), [chat("q", "a")]).ids[0][:13]
        for fast in (True, False)
        for day in (None, "2030-12-24")
    ]
    expected = [
        [ord(letter) - 28 if letter != " " else 225 for letter in day] for day in ("[01 Jan 2025]", "[24 Dec 2030]")
    ]
    assert made == expected * 2
    recipes = [toolkit(tiny, kind="chat", template=source, template_date=day).recipe for day in (None, "2030-12-24")]
    assert [recipe.now for recipe in recipes] == ["2025-01-01", "2030-12-24"]
    assert recipes[0].digest != recipes[1].digest
    assert toolkit(tiny, kind="chat", template_date="2030-12-24").recipe.now is None
