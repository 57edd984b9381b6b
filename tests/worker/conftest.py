"""What the worker's tests share: a tiny tokenizer, toolkits, and a look at what tokenize made."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from packhouse.client.wire import JobSpec
from packhouse.worker.recipe import resolve
from packhouse.worker.records import Reject
from packhouse.worker.tokenize import Samples, Toolkit, tokenize

CHATML = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data beside the repository; a test that needs it is skipped where it is not."""
    folder = Path(__file__).resolve().parents[3] / "shared"
    if not (folder / "data").is_dir():
        pytest.skip("there is no ../shared/data")
    return folder


def _letters() -> list[str]:
    """The characters that byte-level BPE writes for the bytes, printable ones first."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in plain] + [chr(256 + index) for index in range(256 - len(plain))]


@pytest.fixture(scope="session")
def tiny_files() -> dict[str, Any]:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE that merges across words.

    Ids: 0 <unk>, 1 <s> (the post-processor adds it), 2 </s> = eos = pad, 3 <|im_start|>, 4 <|im_end|>, 5-260 bytes,
    261 ab, 262 :/, 263 abab, 264 two spaces.
    """
    specials = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": index, "content": token, **flags} for index, token in enumerate(specials)]
    entries = [*specials, *_letters(), "ab", ":/", "abab", "ĠĠ"]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    start: list[dict[str, Any]] = [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    second = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]
    backend = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": start,
            "pair": start + second,
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": level | {"add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {entry: index for index, entry in enumerate(entries)},
            "merges": [["a", "b"], [":", "/"], ["ab", "ab"], ["Ġ", "Ġ"]],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        "unk_token": "<unk>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHATML,
    }
    return {"tokenizer.json": backend, "tokenizer_config.json": config}


@pytest.fixture(scope="session")
def write_tokenizer() -> Callable[[Path, dict[str, Any]], Path]:
    """Return a function that writes a tokenizer's files into a folder."""

    def write(folder: Path, files: dict[str, Any]) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))
        return folder

    return write


@pytest.fixture(scope="session")
def tiny(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_files: dict[str, Any],
    write_tokenizer: Callable[[Path, dict[str, Any]], Path],
) -> Path:
    """The folder of the tiny tokenizer."""
    return write_tokenizer(tmp_path_factory.mktemp("tiny"), tiny_files)


@pytest.fixture(scope="session")
def rare(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_files: dict[str, Any],
    write_tokenizer: Callable[[Path, dict[str, Any]], Path],
) -> Path:
    """The folder of a tokenizer that gigatoken knows, with two tokens, zq and qz, that no probe is made of."""
    files = json.loads(json.dumps(tiny_files))
    backend = files["tokenizer.json"]
    backend["pre_tokenizer"]["use_regex"] = True
    backend["model"]["vocab"] |= {"zq": 265, "qz": 266}
    backend["model"]["merges"] = [["a", "b"], [":", "/"], ["ab", "ab"], ["z", "q"], ["q", "z"]]
    return write_tokenizer(tmp_path_factory.mktemp("rare"), files)


@dataclass(frozen=True)
class Rows:
    """What a block became, as lists."""

    ids: list[list[int]]
    masks: list[list[int]] | None
    rejects: list[Reject]
    samples: Samples

    @property
    def trained(self) -> list[list[int]]:
        """The trained ids of each sample."""
        assert self.masks is not None
        pairs = zip(self.ids, self.masks, strict=True)
        return [[token for token, bit in zip(ids, mask, strict=True) if bit] for ids, mask in pairs]


@pytest.fixture
def toolkit(memory_store: type[Any]) -> Callable[..., Toolkit]:
    """Return a function (tokenizer folder, fast=True, **fields of a job) -> toolkit."""

    def make(tokenizer: Path, *, fast: bool = True, **fields: Any) -> Toolkit:
        store = memory_store()
        spec = JobSpec(sources=["/none"], tokenizer=str(tokenizer), **fields)
        return Toolkit.load(store, resolve(spec, store).recipe_, fast=fast)

    return make


def _rows(toolkit: Toolkit, records: bytes | list[Any]) -> Rows:
    data = (
        records if isinstance(records, bytes) else b"".join(json.dumps(record).encode() + b"\n" for record in records)
    )
    samples = tokenize(data, toolkit)
    cuts = list(zip(samples.offsets[:-1], samples.offsets[1:], strict=True))
    masks = None if samples.mask is None else [samples.mask[a:b].astype(int).tolist() for a, b in cuts]
    return Rows([samples.ids[a:b].tolist() for a, b in cuts], masks, samples.rejects, samples)


@pytest.fixture(scope="session")
def rows() -> Callable[[Toolkit, bytes | list[Any]], Rows]:
    """Return a function that tokenizes records, or the bytes of a block."""
    return _rows


@pytest.fixture(scope="session")
def chat() -> Callable[..., dict[str, Any]]:
    """Return a function that makes a record of contents, of user and assistant in turn."""

    def make(*contents: str, roles: tuple[str, ...] = ("user", "assistant")) -> dict[str, Any]:
        named = [(roles[index % len(roles)], content) for index, content in enumerate(contents)]
        return {"messages": [{"role": role, "content": content} for role, content in named]}

    return make
