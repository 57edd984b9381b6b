"""Recipes: the digest follows content and nothing else, and what cannot be used is refused at once."""

import contextlib
import copy
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from packhouse.client.errors import Damaged, InvalidRequest, NotFound, Unavailable
from packhouse.client.store import LocalStore
from packhouse.client.wire import JobSpec
from packhouse.worker.recipe import Recipe, TokenizerContent, load_tokenizer, resolve
from packhouse.worker.tokenizer_content import tokenizer_path

Write = Callable[[Path, dict[str, Any]], Path]


@pytest.fixture
def resolved(memory_store: type[Any], tiny: Path) -> Callable[..., Any]:
    def make(tokenizer: Path = tiny, **fields: Any) -> Any:
        spec = JobSpec(**{"sources": ["/none"], "tokenizer": str(tokenizer), "kind": "chat"} | fields)
        return resolve(spec, memory_store())

    return make


def test_the_tokenizer_digest_is_that_of_content(tiny: Path, tmp_path: Path) -> None:
    digest = load_tokenizer(str(tiny))[0].digest
    shutil.copytree(tiny, tmp_path / "copy")
    assert load_tokenizer(str(tmp_path / "copy"))[0].digest == digest
    used = AutoTokenizer.from_pretrained(tiny)
    used(["a", "bb b"], padding=True, truncation=True, max_length=2)
    assert json.loads(used.backend_tokenizer.to_str())["truncation"], "use leaves a state behind"
    used.save_pretrained(tmp_path / "used")
    assert load_tokenizer(str(tmp_path / "used"))[0].digest == digest


@pytest.mark.parametrize("name", ["qwen3", "mistral-spm"])
def test_real_tokenizers_keep_their_digest_when_saved_and_loaded(shared: Path, tmp_path: Path, name: str) -> None:
    folder = shared / "data" / "tokenizers" / name
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path))[0].digest == load_tokenizer(str(folder))[0].digest


def test_digests_are_the_same_in_another_process_under_another_hash_seed(tiny: Path, resolved: Any) -> None:
    script = (
        "import sys; from packhouse.client.wire import JobSpec; from packhouse.client.store import LocalStore\n"
        "from packhouse.worker.recipe import resolve\n"
        "spec = JobSpec(sources=['/x'], tokenizer=sys.argv[1], kind='chat')\n"
        "print(resolve(spec, LocalStore(sys.argv[2])).digest)"
    )
    command = [sys.executable, "-c", script, str(tiny), str(tiny.parent / "store")]
    done = subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": "7"}, capture_output=True, check=True)
    assert done.stdout.decode().strip() == resolved().digest


def _added(files: dict[str, Any]) -> None:
    token = files["tokenizer.json"]["added_tokens"][-1] | {"id": 265, "content": "<eoa>"}
    files["tokenizer.json"]["added_tokens"].append(token)


def _flag(files: dict[str, Any]) -> None:
    files["tokenizer.json"]["added_tokens"][-1]["rstrip"] = True


def _merge(files: dict[str, Any]) -> None:
    files["tokenizer.json"]["model"]["merges"].pop()


def _merge_order(files: dict[str, Any]) -> None:
    files["tokenizer.json"]["model"]["merges"].reverse()


def _ids(files: dict[str, Any]) -> None:
    vocab = files["tokenizer.json"]["model"]["vocab"]
    vocab["x"], vocab["y"] = vocab["y"], vocab["x"]


def _eos(files: dict[str, Any]) -> None:
    files["tokenizer_config.json"]["eos_token"] = "<|im_end|>"


def _template(files: dict[str, Any]) -> None:
    files["tokenizer_config.json"]["chat_template"] += " "


@pytest.mark.parametrize("edit", [_added, _flag, _merge, _merge_order, _ids, _eos, _template])
def test_an_edit_of_the_tokenizer_in_place_changes_the_recipe_and_undoing_it_brings_it_back(
    edit: Callable[[dict[str, Any]], None],
    tiny_files: dict[str, Any],
    write_tokenizer: Write,
    resolved: Any,
    tmp_path: Path,
) -> None:
    folder = write_tokenizer(tmp_path / "tok", tiny_files)
    before = resolved(folder).digest
    edited = copy.deepcopy(tiny_files)
    edit(edited)
    assert resolved(write_tokenizer(folder, edited)).digest != before
    assert resolved(write_tokenizer(folder, tiny_files)).digest == before


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "text"},
        {"template": "{{ messages[0].content }}", "loss": "all"},
        {"loss": "all"},
        {"add_eos": True},
        {"add_bos": True},
        {"max_length": 8},
        {"messages_field": "conversation"},
    ],
)
def test_each_option_that_changes_a_token_or_label_changes_the_digest(resolved: Any, change: dict[str, Any]) -> None:
    assert resolved(**change).digest != resolved().digest
    assert resolved(**change).digest == resolved(**change).digest


def test_overflow_and_lengths_count_when_there_is_a_length(resolved: Any) -> None:
    digests = {
        resolved(max_length=length, overflow=rule).digest for length in (8, 9) for rule in ("truncate", "drop", "error")
    }
    assert len(digests) == 6


@pytest.mark.parametrize(
    "change",
    [
        {"sources": ["/elsewhere"]},
        {"name": "again"},
        {"max_bad_share": 0.5},
        {"on_bad_record": "fail"},
        {"text_field": "body"},
        {"overflow": "drop"},
        {"loss": "assistant"},
        {"add_eos": False},
    ],
)
def test_what_cannot_change_a_token_changes_no_digest(resolved: Any, change: dict[str, Any]) -> None:
    assert resolved(**change).digest == resolved().digest


def test_every_field_of_a_recipe_is_in_its_digest_and_comes_back_from_json(resolved: Any) -> None:
    recipe: Recipe = resolved().recipe_
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
    for name in recipe.to_json():
        assert Recipe.from_json(recipe.to_json() | {name: "other"}).digest != recipe.digest
    assert recipe.shard_key("a" * 32) != recipe.shard_key("b" * 32)


@pytest.fixture
def folders(tmp_path: Path, tiny_files: dict[str, Any], write_tokenizer: Write) -> dict[str, str]:
    backend, config = tiny_files["tokenizer.json"], tiny_files["tokenizer_config.json"]
    remote = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    made = {
        "without": {"readme.json": {}},
        "only config": {"tokenizer_config.json": config},
        "no model": {"tokenizer.json": backend | {"model": None}, "tokenizer_config.json": config},
        "remote code": {"tokenizer.json": backend, "tokenizer_config.json": config | remote},
    }
    paths = {name: str(write_tokenizer(tmp_path / name, files)) for name, files in made.items()}
    for name, text in {"cut": json.dumps(backend)[:500], "empty": "", "binary": "\x00\x01"}.items():
        folder = write_tokenizer(tmp_path / name, {"tokenizer_config.json": config})
        (folder / "tokenizer.json").write_text(text)
        paths[name] = str(folder)
    (write_tokenizer(tmp_path / "dangling", tiny_files) / "vocab.txt").symlink_to("/nowhere")
    file = tmp_path / "file"
    file.write_text("x")
    return paths | {
        "missing": str(tmp_path / "missing"),
        "dangling": str(tmp_path / "dangling"),
        "file": str(file),
        "hub": "Qwen/Qwen3-8B",
        "word": "gpt2",
        "nul": "/a\0b",
        "blank": "",
    }


@pytest.mark.parametrize(
    "name",
    [
        "missing",
        "file",
        "hub",
        "word",
        "nul",
        "blank",
        "without",
        "only config",
        "no model",
        "cut",
        "empty",
        "binary",
        "dangling",
        "remote code",
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_is_refused_within_a_second(
    name: str, folders: dict[str, str], tiny: Path, resolved: Any, tmp_path: Path
) -> None:
    resolved()  # transformers is imported
    for folder in tmp_path.iterdir():
        if folder.is_dir():
            (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: ...\n")
    started = time.monotonic()
    if name == "remote code":  # the tokenizer itself is sound: it may load, but its code must not run
        with contextlib.suppress(InvalidRequest):
            resolved(folders[name])
    else:
        with pytest.raises(InvalidRequest) as caught:
            resolved(folders[name])
        assert caught.value.remedy
    assert time.monotonic() - started < 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ cycler.__init__.__globals__ }}", "cannot render"),
        ("{% for i in range(90000) %}{% for j in range(90000) %}x{% endfor %}{% endfor %}", "more than 1 seconds"),
        ("{{ 9 ** (9 ** 9) }}", "may not raise to powers"),
        ("{{ 'x'.ljust(9000000000) }}", "64 MiB"),
        (
            "{% set ns = namespace(x=[1, 2]) %}{% for i in range(33) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
            "{{ ns.x }}",
            "64 MiB",
        ),
        ("{% if strftime_now %}", "cannot render"),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", "mark what others"),
        ("{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}", "leave out"),
        ("{{ messages.append({'role': 'user', 'content': 'z'}) }}{{ messages[0].content }}", "unsafe"),
        ("{% for m in messages %}{{ m.update({'role': 'x'}) }}{% endfor %}", "unsafe"),
        ("{% for m in messages %}{{ m.content }", "cannot render"),
        ("{% nonsense %}", "cannot render"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "no marker before"),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "no marker behind"),
        ("{% for m in messages %}<|im_start|>{{ m.role }}<|im_end|>{% endfor %}", "content does not show"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_when_the_job_comes_in(
    resolved: Any, template: str, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packhouse.worker.renderers.MAX_SECONDS", 1)
    monkeypatch.setattr("packhouse.worker.renderers.MAX_GROWTH", 64 << 20)
    started = time.monotonic()
    with pytest.raises(InvalidRequest, match=match):
        resolved(template=template)
    assert time.monotonic() - started < 3


@pytest.mark.parametrize("loss", ["all", "assistant"])
def test_an_endless_template_is_stopped_whichever_renderer_would_take_it(
    resolved: Any, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    monkeypatch.setattr("packhouse.worker.renderers.MAX_SECONDS", 0.3)
    loop = "{% for i in range(90000) %}{% for j in range(90000) %}x{% endfor %}{% endfor %}"
    only_jinja = "{% if 1 is sameas 1 and 'a' is filter %}{% endif %}{% import 'x' as y without context %}"
    for template in (loop + "{% generation %}{% endgeneration %}", loop, loop + only_jinja):
        with pytest.raises(InvalidRequest, match=r"fuel|seconds"):
            resolved(template=template, loss=loss)


def test_options_that_do_not_fit_are_refused(resolved: Any, shared: Path) -> None:
    with pytest.raises(InvalidRequest, match="needs kind 'chat'"):
        resolved(kind="text", loss="assistant")
    deepseek, qwen3 = (shared / "data" / "tokenizers" / name for name in ("deepseek-v3", "qwen3"))
    with pytest.raises(InvalidRequest, match="has no chat template: give one as 'template'"):
        resolved(deepseek)
    with pytest.raises(InvalidRequest, match="no bos token: set add_bos to false"):
        resolved(qwen3, add_bos=True)


def test_text_ends_with_eos_and_chat_does_not_unless_asked(resolved: Any) -> None:
    assert [resolved(kind=kind).recipe_.eos_id for kind in ("text", "chat")] == [2, None]
    assert resolved(kind="text", add_eos=False).recipe_.eos_id is None
    assert resolved(add_eos=True, add_bos=True).recipe_.bos_id == 1


def test_markers_that_are_not_tokens_of_their_own_are_warned_of(resolved: Any) -> None:
    template = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<eoa>\\n' }}{% endfor %}"
    assert resolved().warnings == ()
    assert "'<eoa>', which is not a token of its own" in resolved(template=template).warnings[0]


def test_the_tokenizer_is_kept_in_the_store_by_digest_and_healed(tiny: Path, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    spec = JobSpec(sources=["/none"], tokenizer=str(tiny))
    digest = resolve(spec, store).recipe_.tokenizer
    content = TokenizerContent.load(store, digest)
    assert content.digest == digest
    assert content.vocab_size == 265
    path = tokenizer_path(digest)
    for harm in (bytes(store.open(path))[:-5], bytes(store.open(path)).replace(b'"x":92', b'"x":93')):
        store.write(path, harm)
        with pytest.raises(Damaged, match="not what was stored: submit the job again"):
            TokenizerContent.load(store, digest)
        resolve(spec, store)
        assert TokenizerContent.load(store, digest) == content
    store.delete(path)
    with pytest.raises(NotFound):
        TokenizerContent.load(store, digest)


def test_a_store_that_cannot_be_written_is_told(tiny: Path) -> None:
    with pytest.raises(Unavailable, match="store cannot be written"):
        resolve(JobSpec(sources=["/none"], tokenizer=str(tiny)), LocalStore("/proc/none"))


def test_the_vocabulary_is_as_large_as_its_greatest_id(shared: Path) -> None:
    sizes = {"qwen3": 151_669, "deepseek-v3": 129_280, "mistral-spm": 32_000}
    for name, size in sizes.items():
        assert load_tokenizer(str(shared / "data" / "tokenizers" / name))[0].vocab_size == size


def test_the_tiny_tokenizer_is_the_one_of_the_case_log(shared: Path, tiny: Path) -> None:
    folder = shared / "cases" / "inputs" / "tok_tiny"
    assert load_tokenizer(str(folder))[0].digest == load_tokenizer(str(tiny))[0].digest
