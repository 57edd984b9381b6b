"""Named templates: each record is rendered by the one that transformers would take."""

from pathlib import Path
from typing import Any

import pytest
from tests.worker.conftest import CHATML
from transformers import AutoTokenizer

from packhouse.client.errors import InvalidRequest
from packhouse.client.wire import JobSpec
from packhouse.worker.named_templates import as_one
from packhouse.worker.recipe import resolve
from packhouse.worker.render import ChatTemplate

TOOLS = [{"type": "function", "function": {"name": "f", "description": "é"}}]
WITH_TOOLS = "  \n{{ tools | tojson }}\n  {% for m in messages %}\n{{ m.role }}: {{ m.content }}\n  {% endfor %}  \n"
DEFAULT = "\n\n{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>\\n' }}{% endfor %}\n\n"


def named(files: dict[str, Any], *templates: tuple[str, str]) -> dict[str, Any]:
    entries = [{"name": name, "template": template} for name, template in templates]
    return files | {"tokenizer_config.json": files["tokenizer_config.json"] | {"chat_template": entries}}


def test_a_record_with_tools_is_rendered_by_the_template_for_tools(
    tiny_files: dict[str, Any], write_tokenizer: Any, toolkit: Any, rows: Any, tmp_path: Path
) -> None:
    names = [("default", DEFAULT), ("tool_use", WITH_TOOLS), ("rag", "R")]
    folder = write_tokenizer(tmp_path / "t", named(tiny_files, *names))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    records: list[dict[str, Any]] = [{"messages": messages}, {"messages": messages, "tools": TOOLS}]
    for fast in (True, False):
        made = rows(toolkit(folder, kind="chat", loss="all", fast=fast), records)
        assert made.ids == [
            tokenizer.apply_chat_template(messages, tools=record.get("tools"), return_dict=True)["input_ids"]
            for record in records
        ]
        assert made.ids[0] != made.ids[1]


def test_the_two_are_rendered_fast_as_well() -> None:
    source = as_one({"default": CHATML, "tool_use": "{{ tools | tojson }}" + CHATML})
    assert source is not None
    template = ChatTemplate(source, {"bos_token": "<s>"})
    template.prove()
    assert template.fast is not None, template.reason


def test_a_template_that_nobody_is_given_is_not_there(
    tiny_files: dict[str, Any], write_tokenizer: Any, memory_store: Any, tmp_path: Path
) -> None:
    assert as_one({"default": "D", "rag": "R"}) == "D"
    folder = write_tokenizer(tmp_path / "t", named(tiny_files, ("tool_use", CHATML)))
    with pytest.raises(InvalidRequest, match="has no chat template"):
        resolve(JobSpec(sources=["/x"], tokenizer=str(folder), kind="chat"), memory_store())


def test_tags_in_one_of_two_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="only one has"):
        as_one({"default": "{% generation %}{% endgeneration %}", "tool_use": "x"})


def test_a_tokenizer_that_splits_special_tokens_is_refused(
    tiny_files: dict[str, Any], write_tokenizer: Any, memory_store: Any, tmp_path: Path
) -> None:
    config = tiny_files["tokenizer_config.json"] | {"split_special_tokens": True}
    folder = write_tokenizer(tmp_path / "t", tiny_files | {"tokenizer_config.json": config})
    with pytest.raises(InvalidRequest, match="split_special_tokens set"):
        resolve(JobSpec(sources=["/x"], tokenizer=str(folder)), memory_store())
