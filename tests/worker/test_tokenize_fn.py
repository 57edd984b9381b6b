"""Tokenize functions: what is loaded and what is refused, and what becomes of their results."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from packhouse.client.errors import InvalidRequest
from packhouse.client.extra import data_type
from packhouse.client.format import data_path, read_shard
from packhouse.client.wire import JobSpec
from packhouse.worker.by_function import names_in
from packhouse.worker.files import AttachedBlock, at_once
from packhouse.worker.recipe import Recipe, resolve
from packhouse.worker.shards import write_shard
from packhouse.worker.sources import SourceChanged, scan
from packhouse.worker.tokenize import Toolkit, tokenize
from packhouse.worker.work import encode_blocks, names_in_blocks

HERE = "tests.worker.functions"

Resolve = Callable[..., Recipe]
Load = Callable[..., Toolkit]


@pytest.fixture
def resolved(memory_store: type[Any], tiny: Path) -> Resolve:
    """Return a function (name of a function, modules, **fields of a job) -> recipe."""

    def make(function: str, modules: tuple[str, ...] = (HERE,), **fields: Any) -> Recipe:
        full = function if ":" in function or not function.isidentifier() else f"{HERE}:{function}"
        spec = JobSpec(**{"sources": ["/none"], "tokenizer": str(tiny), "tokenize": full} | fields)
        return resolve(spec, memory_store(), modules=modules).recipe_

    return make


@pytest.fixture
def load(memory_store: type[Any], tiny: Path) -> Load:
    """Return a function (class name, **fields of a job) -> toolkit."""

    def make(name: str, **fields: Any) -> Toolkit:
        store = memory_store()
        spec = JobSpec(sources=["/none"], tokenizer=str(tiny), tokenize=f"{HERE}:{name}", **fields)
        return Toolkit.load(store, resolve(spec, store, modules=(HERE,)).recipe_)

    return make


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Wavering", r"gives '1' and then '2'"),
        ("Empty", "gives ''"),
        ("Raising", "raised KeyError"),
        ("Demanding", "missing 1 required positional argument: 'must'"),
        ("WrongExtra", "'complex' is not a type of an extra column"),
        ("TakenName", "'labels' cannot name an extra column"),
        ("NoState", "no state"),
        ("NoCall", "no __call__"),
        ("not_a_class", "defines no class 'not_a_class'"),
        ("Imported", "defines no class 'Imported'"),
        ("os", "defines no class 'os'"),
        (f"{HERE}:Given.hash", "names no function"),
        (f"{HERE}:", "names no function"),
        (":Given", "names no function"),
        ("no function", "names no function"),
    ],
)
def test_what_is_no_sound_function_is_refused_before_anything_runs(resolved: Resolve, name: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        resolved(name)


@pytest.mark.parametrize("allowed", [(), ("unlisted",), ("unlisted_functions.more",), (HERE,)])
def test_nothing_is_imported_from_a_module_that_is_not_listed(
    resolved: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: tuple[str, ...]
) -> None:
    (tmp_path / "unlisted_functions.py").write_text("raise SystemError('it was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidRequest, match="'unlisted_functions' are not allowed") as refused:
        resolved("unlisted_functions:Mine", allowed)
    assert "PACKHOUSE_TOKENIZE_MODULES" in refused.value.remedy
    assert "unlisted_functions" not in sys.modules
    with pytest.raises(InvalidRequest, match=r"cannot be imported \(SystemError: it was imported\)"):
        resolved("unlisted_functions:Mine", ("unlisted_functions",))


def test_options_of_the_class_are_checked_by_making_it(resolved: Resolve) -> None:
    with pytest.raises(InvalidRequest, match="ValueError: must be seven"):
        resolved("Demanding", tokenize_options={"must": 8})
    assert resolved("Demanding", tokenize_options={"must": 7}).tokenize is not None
    with pytest.raises(InvalidRequest, match="name a tokenizer"):
        resolved("Words", tokenize_options={"tokenizer": "x"})


def test_what_a_function_decides_cannot_be_said_beside_it(resolved: Resolve) -> None:
    said: list[dict[str, Any]] = [
        *(
            {"format": "text"},
            {"kind": "chat"},
            {"text_field": "t"},
            {"messages_field": "m"},
            {"fields": {"text": "t"}},
        ),
        *({"loss": "all"}, {"control_tokens": "allow"}, {"add_bos": True}, {"add_eos": False}),
    ]
    for fields in said:
        (name,) = fields
        with pytest.raises(InvalidRequest, match=f"{name} is .* decides that by itself"):
            resolved("Words", **fields)
    with pytest.raises(InvalidRequest, match="takes no tokenizer"):
        resolved("Given", template="chatml")


@pytest.mark.parametrize("fields", [{"tokenize_options": {"a": 1}}, {"file_roots": {"": "/tmp"}}])
def test_what_belongs_to_a_function_is_refused_without_one(resolved: Resolve, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="and no tokenize function"):
        resolved("Given", tokenize=None, **fields)


def test_samples_with_extra_columns_are_not_cut(resolved: Resolve, load: Load) -> None:
    with pytest.raises(InvalidRequest, match=r"overflow 'truncate' would cut .*\(length, marks\)"):
        resolved("Words", max_length=3)
    data = b'{"text": "abcdefgh"}\n{"text": "cd"}\n'
    samples = tokenize(data, load("Words", max_length=3, overflow="drop"))
    assert (samples.rows.tolist(), samples.dropped) == ([1], 1)
    assert samples.extra is not None
    assert samples.extra.field("length").to_pylist() == [2]
    assert tokenize(b'{"return": {"input_ids": [5, 6, 7], "labels": [5, 6, 7]}}', load("Given", max_length=2)).truncated


def test_the_key_follows_options_hash_extra_columns_and_template_and_nothing_else(
    resolved: Resolve, tiny: Path, tmp_path: Path
) -> None:
    recipe = resolved("Words")
    assert resolved("Words", tokenize_options={}).digest == recipe.digest
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
    others = [
        resolved("Words", tokenize_options={"untrained": 2}),
        resolved("Words", tokenize_options={"untrained": 1}),
        resolved("Words", template="qwen3"),
        resolved("Given"),
        resolved("Beside"),
    ]
    assert len({recipe.digest, *(other.digest for other in others)}) == 6
    again = resolved("Words", tokenizer=str(shutil.copytree(tiny, tmp_path / "copy")), max_bad_share=0.5, name="x")
    assert again.digest == recipe.digest


def test_recipes_without_a_function_are_what_they_were(toolkit: Any, tiny: Path) -> None:
    recipe = toolkit(tiny).recipe
    assert "tokenize" not in recipe.to_json()
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_a_function_is_given_the_tokenizer_of_the_job_and_its_template(load: Load, rows: Any) -> None:
    toolkit = load("Words", tokenize_options={"untrained": 2}, template="chatml")
    assert toolkit.function is not None
    function = toolkit.function.call
    assert function.state == "cache"
    made = rows(toolkit, [{"text": "abab:/x", "marks": [1, 2.5]}, {"text": "cd e"}])
    assert made.ids[0] == [263, 262, 5 + ord("x") - 33]
    assert made.masks == [[0, 0, 1], [0, 0, 1, 1]]
    assert made.samples.extra.to_pylist() == [{"length": 7, "marks": [1.0, 2.5]}, {"length": 4, "marks": None}]
    told = function.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert told == "<|im_start|>user\nHi<|im_end|>\n"


def test_a_template_that_asks_for_the_day_is_told_the_pinned_one(load: Load, resolved: Resolve) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ strftime_now('%Y-%m-%d') }}"
    toolkit = load("Words", template=template)
    assert toolkit.function is not None
    chat = [{"role": "user", "content": "Hi"}]
    assert toolkit.function.call.tokenizer.apply_chat_template(chat, tokenize=False) == "Hi2025-01-01"
    assert (
        resolved("Words", template=template).digest
        != resolved("Words", template=template, template_date="2025-02-02").digest
    )


def test_the_function_that_the_readme_shows_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Path, memory_store: type[Any], rows: Any
) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    code = readme.partition("```python\nclass Poems")[2].partition("```")[0]
    (tmp_path / "my_functions.py").write_text(f"class Poems{code}")
    monkeypatch.syspath_prepend(tmp_path)
    store, record = memory_store(), {"title": "ab", "poem": "cd\ne"}
    for options, trained in (({}, 4), ({"title_trained": True}, 5)):
        spec = JobSpec(sources=["/none"], tokenizer=str(tiny), tokenize="my_functions:Poems", tokenize_options=options)
        made = rows(Toolkit.load(store, resolve(spec, store, modules=("my_functions",)).recipe_), [record])
        assert (len(made.ids[0]), sum(made.masks[0])) == (5, trained)
        assert made.samples.extra.to_pylist() == [{"lines": 2}]


GOOD = {"input_ids": [5, 6], "labels": [-100, 6]}


@pytest.mark.parametrize(
    ("record", "reason", "told"),
    [
        ({"return": GOOD}, "", ""),
        ({"return": {"input_ids": [5, 6], "labels": [6, -100]}}, "bad_tokens", "not to be shifted"),
        ({"return": {"input_ids": [5, 6], "labels": [5]}}, "bad_tokens", "2 ids, and 1 labels"),
        (
            {"return": {"input_ids": [5, 265], "labels": [5, -100]}},
            "bad_tokens",
            "id 265 is not in the vocabulary of 265",
        ),
        ({"return": {"input_ids": [-1], "labels": [-1]}}, "bad_tokens", "id -1"),
        ({"return": {"input_ids": [5.0], "labels": [5]}}, "bad_tokens", "float64"),
        ({"return": {"input_ids": [True], "labels": [1]}}, "bad_tokens", "bool"),
        ({"return": {"input_ids": [[5]], "labels": [5]}}, "bad_tokens", r"shape \(1, 1\)"),
        ({"return": {"input_ids": [[5], [5, 6]], "labels": [5]}}, "bad_tokens", "input_ids"),
        ({"return": {"input_ids": [2**70], "labels": [5]}}, "bad_tokens", "float64"),
        ({"return": {"input_ids": None, "labels": [5]}}, "bad_tokens", "object"),
        ({"return": {"input_ids": [], "labels": []}}, "empty", "no id"),
        ({"return": {"input_ids": [5], "labels": [-100]}}, "nothing_to_train", "-100"),
        ({"return": {"input_ids": [5]}}, "bad_tokens", r"the fields \['input_ids'\]"),
        ({"return": [5]}, "bad_tokens", "gives list"),
        ({"return": {**GOOD, "more": 1}}, "bad_extra", "'more', which its class does not state"),
        ({"tensor": [5, 6], "grad": True}, "bad_tokens", "RuntimeError: Can't call numpy"),
        ({"raise": "value"}, "tokenize_error", "^ValueError: of the user's$"),
        ({"raise": "exit"}, "tokenize_error", "SystemExit"),
        ({"raise": "deep"}, "tokenize_error", "RecursionError"),
        ({"raise": "mute"}, "tokenize_error", "^Mute$"),
        ({"lazy": True}, "tokenize_error", "ValueError: not yet"),
        ({}, "tokenize_error", "KeyError: 'return'"),
    ],
)
def test_a_wrong_result_or_an_exception_keeps_its_record_out_and_no_other(
    load: Load, rows: Any, record: dict[str, Any], reason: str, told: str
) -> None:
    made = rows(load("Given"), [{"return": GOOD}, record, {"return": GOOD}])
    if not reason:
        assert (made.ids, made.masks) == ([[5, 6]] * 3, [[0, 1]] * 3)
        return
    assert made.ids == [[5, 6]] * 2
    ((row, why, detail),) = [(reject.row, reject.reason, reject.detail) for reject in made.rejects]
    assert (row, why) == (1, reason)
    assert re.search(told, detail), detail


def test_ids_may_come_as_tensors(load: Load, rows: Any) -> None:
    assert rows(load("Given"), [{"tensor": [5, 6]}]).ids == [[5, 6]]


def test_a_function_may_say_its_own_reason(load: Load, rows: Any) -> None:
    made = rows(load("Words"), [{"text": "bad"}, {"text": "good"}, {"text": "odd", "also": {"length": "x"}}])
    assert (made.rejects[0].reason, made.rejects[0].detail) == ("not_wanted", "this one is not wanted")
    assert made.rejects[1].reason == "bad_extra"
    assert made.samples.rows.tolist() == [1]


def test_a_function_that_rolls_dice_is_found_out(load: Load, rows: Any) -> None:
    with pytest.raises(InvalidRequest, match="another result when it is called again"):
        rows(load("Dice"), [{}])


def test_a_hash_that_differs_between_processes_is_found_out(
    load: Load, monkeypatch: pytest.MonkeyPatch, memory_store: type[Any], tiny: Path
) -> None:
    store = memory_store()
    spec = JobSpec(sources=["/none"], tokenizer=str(tiny), tokenize=f"{HERE}:OfProcess")
    recipe = resolve(spec, store, modules=(HERE,)).recipe_
    assert Toolkit.load(store, recipe).function is not None
    monkeypatch.setenv("TOLD", "elsewhere")
    with pytest.raises(InvalidRequest, match="another hash"):
        Toolkit.load(store, recipe)


def test_files_are_named_looked_up_and_handed_over(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\0\1")
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    (outside / "b.bin").write_bytes(b"\2")
    inside = tmp_path / "in"
    inside.mkdir()
    (inside / "a.bin").write_bytes(b"\0\1")
    (inside / "link").symlink_to(outside / "b.bin")
    (inside / "pipe").mkdir()
    names = [
        "a.bin",
        "../elsewhere/b.bin",
        "link",
        "gone",
        "pipe",
        str(outside / "b.bin"),
        "x\0y",
        "far/b.bin",
        "a.bin",
    ]
    data = b"".join(json.dumps({"file": name}).encode() + b"\n" for name in names) + b'{"no": 1}\n'
    toolkit = load("Beside")
    assert toolkit.function is not None
    assert names_in(data, toolkit.function) == names[:-1]
    source = str(inside / "rows.jsonl")
    files = at_once(names, source, {})
    samples = tokenize(data, toolkit, files)
    assert samples.rows.tolist() == [0, 8]
    reasons = [reject.reason for reject in samples.rejects]
    outsiders = ["file_outside", "file_outside", "missing_file", "missing_file", "file_outside", "missing_file"]
    assert reasons == [*outsiders, "missing_file", "tokenize_error"]
    allowed = at_once(names, source, {"far/": str(outside)})
    assert [allowed[name].problem for name in names] == [
        "",
        "",
        "",
        "missing_file",
        "missing_file",
        "",
        "missing_file",
        "",
        "",
    ]


def test_a_file_that_changes_while_the_job_runs_stops_it(memory_store: type[Any], tiny: Path, tmp_path: Path) -> None:
    store, source, file = memory_store(), tmp_path / "rows.jsonl", tmp_path / "a.bin"
    source.write_text('{"file": "a.bin"}\n')
    file.write_bytes(b"\0\1")
    spec = JobSpec(sources=[str(source)], tokenizer=str(tiny), tokenize=f"{HERE}:Beside")
    recipe = resolve(spec, store, modules=(HERE,)).recipe_
    (block,) = scan(str(source))
    assert names_in_blocks(store, recipe, [block]) == [(block.digest, ["a.bin"])]
    attached = AttachedBlock.of(block, list(at_once(["a.bin"], str(source), {}).values()))
    (done,) = encode_blocks(store, recipe, [attached], fast=True)
    assert (done.receipt.key, done.receipt.tokens) == (recipe.shard_key(attached.digest), 2)
    assert attached.digest != block.digest
    file.write_bytes(b"\0\1\2")
    with pytest.raises(SourceChanged, match=r"a\.bin' changed while the job ran"):
        encode_blocks(store, recipe, [attached], fast=True)


def test_extra_columns_are_kept_typed_and_shards_without_any_keep_their_bytes(
    load: Load, toolkit: Any, tiny: Path, memory_store: type[Any]
) -> None:
    store = memory_store()
    data = b'{"text": "abc", "marks": [1.5]}\n{"text": "de"}\n'
    receipt = write_shard(store, "k" * 32, tokenize(data, load("Words")), 265)
    shard = read_shard(store, receipt)
    assert [shard.extra_of(row) for row in range(2)] == [{"length": 3, "marks": [1.5]}, {"length": 2, "marks": None}]
    assert shard.extra is not None
    assert shard.extra.type == pa.struct([("length", pa.int64()), ("marks", pa.list_(pa.float32()))])
    plain = write_shard(store, "p" * 32, tokenize(data, toolkit(tiny)), 265)
    assert read_shard(store, plain).extra_of(0) == {}
    names = pa.ipc.open_file(store.open(data_path(plain.key))).schema.names
    assert names == ["input_ids", "num_tokens", "attention_cost", "trained_tokens", "labels", "row"]
    empty = write_shard(store, "e" * 32, tokenize(b'{"text": "bad"}', load("Words")), 265)
    assert empty.rows == 0
    assert getattr(read_shard(store, empty).extra, "type", None) == shard.extra.type


def test_the_types_of_extra_columns_are_arrows() -> None:
    assert data_type("list<list<int32>>") == pa.list_(pa.list_(pa.int32()))
    for name in ("list<>", "list<int32", "decimal", "timestamp[s]", ""):
        with pytest.raises(InvalidRequest, match="not a type"):
            data_type(name)
