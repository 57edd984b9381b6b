"""What the demo works on: sources and docstrings of the standard library, and a tokenizer trained on them."""

import ast
import json
import sysconfig
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

CORPUS_BYTES = 40_000_000
SAMPLE_CHARACTERS = 4_000_000
VOCABULARY = 4096
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, the form that InternLM2 was trained on."""


def write_corpus(folder: Path) -> tuple[Path, Path]:
    """Write ``texts.jsonl`` (source files) and ``chats.jsonl`` (docstrings as answers); return both paths."""
    texts, chats = folder / "texts.jsonl", folder / "chats.jsonl"
    written = 0
    with open(texts, "w", encoding="utf-8") as text_file, open(chats, "w", encoding="utf-8") as chat_file:
        for module, source in _modules():
            written += text_file.write(json.dumps({"text": source}, ensure_ascii=False) + "\n")
            if not module.startswith("test."):
                for chat in _chats(module, source):
                    chat_file.write(json.dumps({"messages": chat}, ensure_ascii=False) + "\n")
            if written >= CORPUS_BYTES:
                break
    return texts, chats


def _modules() -> Iterator[tuple[str, str]]:
    """Yield name and source of the standard library's modules: first the library, then its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in root.rglob("*.py") if "site-packages" not in path.parts]
    for path in sorted(files, key=lambda path: ("test" in path.parts or "tests" in path.parts, path.as_posix())):
        try:
            source = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a few test files are broken on purpose
        if source:
            yield ".".join(path.relative_to(root).with_suffix("").parts), source


def _chats(module: str, source: str) -> Iterator[list[dict[str, str]]]:
    """Yield a chat for every pair of neighbouring functions and classes of a module that have docstrings."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    documented = [
        (node.name, text)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node))
    ]
    for pair in pairwise(documented):
        chat = [{"role": "system", "content": "You explain the Python standard library."}]
        for name, text in pair:
            chat.append({"role": "user", "content": f"What does {module}.{name} do?"})
            chat.append({"role": "assistant", "content": text})
        yield chat


def train_tokenizer(texts: list[str], folder: Path) -> None:
    """Train a byte-level BPE on ``texts`` and save it with a chat template. Needs tokenizers and transformers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


def sample_texts(*files: Path) -> list[str]:
    """Return lines of ``files`` spread over them, for the tokenizer to learn from."""
    texts: list[str] = []
    for file in files:
        lines = file.read_text(encoding="utf-8").rstrip("\n").split("\n")
        budget = SAMPLE_CHARACTERS // len(files)
        stride = max(1, sum(map(len, lines)) // budget)
        texts += [json.dumps(json.loads(line), ensure_ascii=False) for line in lines[::stride]]
    return texts
