"""Blocks to samples: special ids, lengths, masks and counts; the public bug reports that concern them."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhouse.worker.tokenize import TooLong, tokenize

GENERATION = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
)
CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + (m['content'] or '') }}"
    "{% for c in m.get('tool_calls') or [] %}{{ c['function'] | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
)
ONE_CHAT = [1, 3, 89, 87, 73, 86, 203, 76, 77, 4, 203, 3, 69, 87, 87, 77, 87, 88, 69, 82, 88, 203, 83, 79, 4, 203]


def text_of(ids: list[int], tiny_files: dict[str, Any]) -> str:
    """Decode byte by byte."""
    names = {index: entry for entry, index in tiny_files["tokenizer.json"]["model"]["vocab"].items()}
    letters = list(names.values())[5:261]
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    order = plain + [byte for byte in range(256) if byte not in plain]
    value = dict(zip(letters, order, strict=True))
    parts = [names[token].encode() if token < 5 else bytes(value[letter] for letter in names[token]) for token in ids]
    return b"".join(parts).decode()


@pytest.mark.parametrize("template", [None, GENERATION])
def test_b001_b007_the_start_stands_once_and_lengths_are_of_ids(
    template: str | None, toolkit: Any, rows: Any, chat: Any, tiny: Path
) -> None:
    for extra in ({}, {"add_bos": True}):
        made = rows(toolkit(tiny, kind="chat", template=template, **extra), [chat("hi", "ok")])
        assert made.ids == [ONE_CHAT]
        assert made.trained == [[83, 79, 4]]
        assert np.diff(made.samples.offsets).tolist() == [26]


def test_b003_a_turn_at_the_very_start(toolkit: Any, rows: Any, chat: Any, tiny: Path) -> None:
    template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
        "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    made = rows(toolkit(tiny, kind="chat", template=template), [chat("A", "qq", roles=("assistant", "user"))])
    assert (made.ids, made.masks) == ([[37, 85, 85]], [[1, 0, 0]])


@pytest.mark.parametrize("template", [None, GENERATION])
def test_b004_a_cut_turn_keeps_its_mask(template: str | None, toolkit: Any, rows: Any, chat: Any, tiny: Path) -> None:
    made = rows(toolkit(tiny, kind="chat", template=template, max_length=24), [chat("hi", "ok")])
    assert made.ids == [ONE_CHAT[:24]]
    assert made.trained == [[83, 79]]
    assert (made.samples.truncated, made.samples.truncated_tokens) == (1, 2)


def test_b009_added_tokens_and_spaces(toolkit: Any, rows: Any, tiny: Path) -> None:
    records = [{"text": "#A\n<|im_start|><|im_end|>\n\n#B"}, {"text": " <|im_end|> x"}]
    made = rows(toolkit(tiny, add_eos=False), records)
    assert made.ids == [[7, 37, 203, 3, 4, 203, 203, 7, 38], [225, 4, 225, 92]]


@pytest.mark.parametrize("template", [None, GENERATION])
def test_b010_characters_of_several_tokens(
    template: str | None, toolkit: Any, rows: Any, chat: Any, tiny: Path
) -> None:
    kit = toolkit(tiny, kind="chat", template=template)
    expected = [[177, 258, 251, 227, 83, 79, 4]]
    quick = rows(kit, [chat("é", "😀ok")])
    assert (quick.trained, quick.samples.fallbacks["offsets"]) == (expected, 0)
    kit.encoder.token_bytes = None
    slow = rows(kit, [chat("é", "😀ok")])
    assert (slow.trained, slow.samples.fallbacks["offsets"]) == (expected, 1)


def test_b014_tools_are_written_as_the_model_knows_them(
    toolkit: Any, rows: Any, tiny: Path, tiny_files: dict[str, Any]
) -> None:
    template = "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}"
    template += "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tools = [{"name": "f", "description": "查<天>&'q'"}]
    record = {"tools": tools, "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]}
    made = rows(toolkit(tiny, kind="chat", template=template, loss="all"), [record])
    assert text_of(made.ids[0], tiny_files) == f"<s>{json.dumps(tools, ensure_ascii=False)}hiok"
    assert made.masks is None


def test_b015_b016_rows_keep_their_own_arguments(
    toolkit: Any, rows: Any, tiny: Path, tiny_files: dict[str, Any]
) -> None:
    arguments = [{"city": "X"}, {"n": 3}, {"t": "2025-08-01"}, {"t": 1690876800}, {"id": 2**80}]
    records = [
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": value}}]},
            ]
        }
        for value in arguments
    ]
    made = rows(toolkit(tiny, kind="chat", template=CALLS), records)
    texts = [text_of(ids, tiny_files) for ids in made.ids]
    for text, trained, value in zip(texts, made.trained, arguments, strict=True):
        call = json.dumps({"name": "f", "arguments": value})
        assert text == f"<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n{call}<|im_end|>\n"
        assert text_of(trained, tiny_files) == f"{call}<|im_end|>"


@pytest.mark.parametrize(
    ("fields", "text", "ids"),
    [
        ({}, "a", [69, 2]),
        ({"add_bos": True}, "a", [1, 69, 2]),
        ({"add_bos": True, "add_eos": False}, "a", [1, 69]),
        ({"add_eos": False}, "a", [69]),
        ({"add_bos": True}, "<s>a</s>", [1, 69, 2]),
        ({"add_bos": True}, "</s>a<s>", [1, 2, 69, 1, 2]),
        ({"add_bos": True}, "<s>", [1, 2]),
        ({"add_bos": True}, "</s>", [1, 2]),
        ({"add_bos": True}, "", [1, 2]),
        ({"add_eos": False}, "", []),
        ({"add_bos": True, "max_length": 2}, "abc", [1, 261]),
        ({"max_length": 2}, "a", [69, 2]),
    ],
)
def test_b020_special_ids_are_added_by_id_and_never_twice(
    fields: dict[str, Any], text: str, ids: list[int], toolkit: Any, rows: Any, tiny: Path
) -> None:
    assert rows(toolkit(tiny, **fields), [{"text": text}]).ids == [ids]


def test_special_ids_are_added_to_each_sample_by_its_own_state(toolkit: Any, rows: Any, tiny: Path) -> None:
    records = [{"text": text} for text in ("", "a", "<s>b", "c</s>", "<s>d</s>", "")]
    made = rows(toolkit(tiny, add_bos=True), records)
    assert made.ids == [[1, 2], [1, 69, 2], [1, 70, 2], [1, 71, 2], [1, 72, 2], [1, 2]]


def test_an_added_end_is_trained_where_what_it_ends_is(toolkit: Any, rows: Any, chat: Any, tiny: Path) -> None:
    template = GENERATION.replace("{{ '\\n' }}", "")
    kit = toolkit(tiny, kind="chat", template=template, add_eos=True)
    made = rows(kit, [chat("hi", "ok"), chat("hi", "ok", "so")])
    assert made.trained == [[83, 79, 4, 2], [83, 79, 4]]
    assert [ids[-1] for ids in made.ids] == [2, 2]


def test_b021_markers_of_several_tokens(toolkit: Any, rows: Any, chat: Any, tiny: Path, tiny_files: Any) -> None:
    template = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<eoa>\\n' }}{% endfor %}"
    made = rows(toolkit(tiny, kind="chat", template=template), [chat("hi", "ok", "a", "b")])
    assert text_of(made.trained[0], tiny_files) == "ok<eoa>b<eoa>"


@pytest.fixture
def sparse(tmp_path: Path, write_tokenizer: Any) -> Path:
    """A tokenizer of words with ids beyond 16 bits."""
    vocab = {"<unk>": 0, "a": 1, "m": 65535, "n": 65536, "z": 92543}
    unknown = {"id": 0, "content": "<unk>", "single_word": False, "lstrip": False, "rstrip": False}
    backend: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [unknown | {"normalized": False, "special": True}],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }
    backend |= {"normalizer": None, "post_processor": None, "decoder": None, "truncation": None, "padding": None}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    folder: Path = write_tokenizer(tmp_path / "sparse", {"tokenizer.json": backend, "tokenizer_config.json": config})
    return folder


def test_b029_ids_beyond_16_bits(toolkit: Any, rows: Any, sparse: Path) -> None:
    kit = toolkit(sparse, add_eos=False)
    assert (rows(kit, [{"text": "a m n z"}]).ids, kit.vocab_size) == ([[1, 65535, 65536, 92543]], 92544)


def test_b031_b032_b035_b039_odd_lines(toolkit: Any, rows: Any, tiny: Path, tiny_files: Any) -> None:
    kit = toolkit(tiny, add_eos=False)
    plain = rows(kit, b'{"text":"a"}\n{"text":"b"}\n')
    assert rows(kit, b'\xef\xbb\xbf{"text":"a"}\r\n{"text":"b"}').ids == plain.ids == [[69], [70]]
    blank = rows(kit, b'{"text":"a"}\n\n   \n{"text":"b"}\n{"text":"c"}')
    assert (blank.ids, blank.samples.rows.tolist(), blank.samples.records) == ([[69], [70], [71]], [0, 3, 4], 3)
    assert text_of(rows(kit, b'{"text":"2024-01-02"}').ids[0], tiny_files) == "2024-01-02"
    long = rows(kit, b'{"text":"' + b"a" * 3_000_000 + b'"}\n{"text":"b"}\n')
    assert [len(ids) for ids in long.ids] == [3_000_000, 1]


def test_b034_extra_keys_change_nothing_but_a_zero_weight_is_obeyed(toolkit: Any, rows: Any, tiny: Path) -> None:
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    records = [
        {"messages": [user, answer]},
        {"messages": [user | {"name": "n1"}, answer], "extra": [1]},
        {"messages": [user | {"name": "n1"}, answer | {"weight": 0}], "extra": [1]},
    ]
    made = rows(toolkit(tiny, kind="chat", template=GENERATION), records)
    assert made.ids[0] == made.ids[1]
    assert [(reject.row, reject.reason) for reject in made.rejects] == [(2, "nothing_to_train")]
    everything = rows(toolkit(tiny, kind="chat", template=GENERATION, loss="all"), records)
    assert everything.ids == [made.ids[0]] * 3


def test_b095_a_system_turn_is_kept_and_not_trained(toolkit: Any, rows: Any, tiny: Path, tiny_files: Any) -> None:
    messages = [("system", "sys"), ("user", "a"), ("assistant", "b")]
    record = {"messages": [{"role": role, "content": content} for role, content in messages]}
    made = rows(toolkit(tiny, kind="chat"), [record])
    assert "<|im_start|>system\nsys<|im_end|>" in text_of(made.ids[0], tiny_files)
    assert text_of(made.trained[0], tiny_files) == "b<|im_end|>"


@pytest.mark.parametrize("template", [None, GENERATION])
def test_b097_b098_all_answers_are_trained(
    template: str | None, toolkit: Any, rows: Any, chat: Any, tiny: Path
) -> None:
    made = rows(toolkit(tiny, kind="chat", template=template), [chat("q1", "r1", "q2", "r2"), chat("hi", "ok")])
    assert made.trained == [[86, 21, 4, 86, 22, 4], [83, 79, 4]]


@pytest.mark.parametrize(
    ("overflow", "ids", "numbers"),
    [
        ("truncate", [[69, 2], [71, 71, 71], [71, 72, 2], [69, 71, 69]], (0, 2, 3)),
        ("drop", [[69, 2], [71, 72, 2]], (2, 0, 9)),
    ],
)
def test_samples_longer_than_max_length(
    overflow: str, ids: list[list[int]], numbers: tuple[int, ...], toolkit: Any, rows: Any, tiny: Path
) -> None:
    records = [{"text": text} for text in ("a", "cccc", "cd", "aca")]
    made = rows(toolkit(tiny, max_length=3, overflow=overflow), records)
    assert made.ids == ids
    assert (made.samples.dropped, made.samples.truncated, made.samples.truncated_tokens) == numbers
    assert made.samples.records == len(made.ids) + made.samples.dropped


def test_a_sample_cut_short_has_no_end(toolkit: Any, rows: Any, tiny: Path) -> None:
    made = rows(toolkit(tiny, max_length=1), [{"text": "cd"}, {"text": ""}])
    assert made.ids == [[71], [2]]


def test_overflow_error_names_the_row(toolkit: Any, tiny: Path) -> None:
    kit = toolkit(tiny, max_length=2, overflow="error")
    assert len(tokenize(b'{"text":"a"}\n', kit).ids) == 2
    with pytest.raises(TooLong, match="a sample of 4 tokens is longer than max_length 2: raise max_length") as caught:
        tokenize(b'{"text":"a"}\n\nnot JSON\n{"text":"ccc"}\n', kit)
    assert caught.value.row == 3


def test_a_chat_cut_before_its_answer_is_kept_out(toolkit: Any, rows: Any, chat: Any, tiny: Path) -> None:
    data = b"\n".join(json.dumps(chat("x" * count, "ok")).encode() for count in (1, 100, 1)) + b"\n"
    made = rows(toolkit(tiny, kind="chat", max_length=24), data)
    assert made.samples.rows.tolist() == [0, 2]
    (reject,) = made.rejects
    assert (reject.row, reject.reason) == (1, "nothing_to_train")
    assert reject.detail == "no trained token is among the 24 of 124 that max_length leaves"
    assert data[reject.offset : reject.offset + reject.length] == data.split(b"\n")[1]
    assert (made.samples.truncated, made.samples.truncated_tokens) == (2, 2)
    dropped = rows(toolkit(tiny, kind="chat", max_length=24, overflow="drop"), data)
    assert (dropped.samples.dropped, dropped.rejects) == (3, [])


def test_a_turn_that_no_token_stands_for_is_no_empty_mask(toolkit: Any, rows: Any, chat: Any, sparse: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content + ' ' }}{% endif %}{% endfor %}"
    )
    made = rows(toolkit(sparse, kind="chat", template=template), [chat("a", "  "), chat("a", "z")])
    assert (made.ids, made.masks) == ([[1, 92543]], [[0, 1]])
    assert [(reject.row, reject.reason) for reject in made.rejects] == [(0, "nothing_to_train")]


def test_every_record_is_a_sample_or_has_a_reason(toolkit: Any, rows: Any, tiny: Path) -> None:
    data = b'{"text":"a"}\nhunter2\n\n{"text":7}\n{"body":"hunter2"}\n{"text":"\xff"}\n{"text":"b"}\n[1]\n'
    made = rows(toolkit(tiny), data)
    assert made.samples.records == 7
    assert made.samples.rows.tolist() == [0, 6]
    found = [(reject.row, reject.reason) for reject in made.rejects]
    expected = ["invalid_json", "wrong_type", "missing_field", "invalid_utf8", "not_an_object"]
    assert found == list(zip([1, 3, 4, 5, 7], expected, strict=True))
    for reject in made.rejects:
        assert data[reject.offset : reject.offset + reject.length] == data.split(b"\n")[reject.row]
        assert "hunter2" not in reject.detail


@pytest.mark.parametrize("depth", [200, 900, 1_000, 5_000])
def test_a_deeply_nested_record_ends_no_job(depth: int, toolkit: Any, rows: Any, tiny: Path) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    messages = f'[{{"role":"user","content":"q"}},{{"role":"assistant","content":"a","tool_calls":[{deep}]}}]'
    data = f'{{"messages":{messages}}}\n{{"messages":[{{"role":"assistant","content":"a"}}]}}\n'.encode()
    made = rows(toolkit(tiny, kind="chat", template=CALLS.replace("c['function']", "c")), data)
    assert made.samples.records == 2
    assert made.samples.rows.tolist() in ([1], [0, 1])
    assert all(reject.reason in ("invalid_json", "unsupported", "template") for reject in made.rejects)


def test_b019_a_document_of_a_million_tokens_beside_short_ones(tokenizer_dir: Path, toolkit: Any, rows: Any) -> None:
    kit = toolkit(tokenizer_dir)
    short = [{"text": f"row {index}"} for index in range(100)]
    started = time.monotonic()
    made = rows(kit, [*short, {"text": "ab" * 1_000_000}, {"text": "_" * 2_000_000}, *short])
    assert time.monotonic() - started < 30
    assert made.ids[:100] == made.ids[102:] == rows(kit, short).ids
    assert len(made.ids[100]) > 1 << 19
    truth = kit.encoder.slow.encode(["ab" * 10_000]).ids.tolist()
    assert made.ids[100][: len(truth) - 10] == truth[:-10]


def test_batches_are_joined_as_if_they_were_one(
    toolkit: Any, rows: Any, chat: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [chat("q" * (index % 7), "é" * (index % 5), "x", f"a{index}") for index in range(40)]
    kit = toolkit(tiny, kind="chat", max_length=60)
    whole = rows(kit, records)
    monkeypatch.setattr("packhouse.worker.tokenize.BATCH_CHARACTERS", 150)
    parts = rows(kit, records)
    assert (parts.ids, parts.masks) == (whole.ids, whole.masks)
    assert parts.samples.rows.tolist() == whole.samples.rows.tolist()


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_a_block_without_a_usable_record_has_no_sample(kind: str, toolkit: Any, rows: Any, tiny: Path) -> None:
    for data, records in ((b"", 0), (b"\n \n", 0), (b"nonsense\n", 1)):
        made = rows(toolkit(tiny, kind=kind), data)
        assert (made.ids, made.samples.records, len(made.rejects)) == ([], records, records)
        assert (made.masks is None) == (kind == "text")


def test_text_that_the_tokenizer_alters_takes_the_slow_path_and_is_right(
    tiny_files: Any, write_tokenizer: Any, toolkit: Any, rows: Any, chat: Any, tmp_path: Path
) -> None:
    for name, normalizer in (("nfc", {"type": "NFC"}), ("lower", {"type": "Lowercase"})):
        backend = tiny_files["tokenizer.json"] | {"normalizer": normalizer}
        folder = write_tokenizer(tmp_path / name, tiny_files | {"tokenizer.json": backend})
        made = rows(toolkit(folder, kind="chat"), [chat("e\u0301", "A\u0301b"), chat("q", "ok")])
        first = {"nfc": "Áb", "lower": "a\u0301b"}[name]
        assert [text_of(ids, tiny_files) for ids in made.trained] == [first + "<|im_end|>", "ok<|im_end|>"]
        assert made.samples.fallbacks["offsets"] == {"nfc": 1, "lower": 2}[name]
