"""Chat caching, measured: packhouse against transformers' chat template and tokenizer, and against XTuner's way.

All in one run on the same two-turn chats, each with one process a core, tokenizers loaded before the clock starts.
XTuner's way is what its tokenize function does, in our words: each message is written and tokenized on its own, and the
assistant's are labelled; it makes token counts only, where we also write shards with masks. Run it with ``make bench``.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from corpus import documents
from parts import Figures, Part, Skipped, apart, main
from rich.console import Console
from rich.table import Table

QWEN3 = Path(__file__).resolve().parents[3] / "shared" / "data" / "tokenizers" / "qwen3"
OURS, PEER = 64_000_000, 6_000_000
CORES = len(os.sched_getaffinity(0))


def write_chats(path: Path, size: int) -> None:
    """Write at least ``size`` bytes of chats: pieces of texts, asked and answered in turn."""
    done = 0
    with path.open("wb") as file:
        for text in documents():
            for start in range(0, len(text), 3200):
                parts = [text[start + at : start + at + length] for at, length in ((0, 300), (300, 1300), (1600, 200))]
                parts.append(text[start + 1800 : start + 3200])
                if not all(part.strip() for part in parts):
                    continue
                roles = ("user", "assistant") * 2
                messages = [{"role": role, "content": part} for role, part in zip(roles, parts, strict=True)]
                done += file.write(json.dumps({"messages": messages}).encode() + b"\n")
            if done >= size:
                return


def packhouse(file: str, tokenizer: str, folder: str) -> Figures:
    """Cache the file, masks included, to committed shards."""
    from packhouse.client.store import LocalStore
    from packhouse.client.wire import JobSpec
    from packhouse.worker import pipeline, recipe, work

    class Memory(dict[str, bytes]):
        def get(self, keys: list[str]) -> dict[str, bytes]:  # type: ignore[override]
            return {key: self[key] for key in keys if key in self}

        put = dict.update

    store, spec = LocalStore(folder), JobSpec(sources=[file], tokenizer=tokenizer, kind="chat")
    executor = pipeline.Executor()
    executor.start()
    resolved = recipe.resolve(spec, store)
    for task in [executor.submit(work.warm_up, store, resolved.recipe_) for _ in range(executor.cpus)]:
        executor.result(task)
    told: list[Any] = []
    common = {"store": store, "index": Memory(), "executor": executor, "cancelled": threading.Event()}
    start = time.perf_counter()
    pipeline.run(spec, resolved, on_progress=told.append, **common)  # type: ignore[arg-type]
    seconds = time.perf_counter() - start
    executor.shutdown()
    last = told[-1]
    figures = {"trained": last.trained_tokens, "engines": last.engines, "fallbacks": last.fallbacks}
    return {"seconds": seconds, "bytes": last.bytes, "tokens": last.tokens, **figures}


def template_and_tokenizer(file: str, tokenizer: str) -> Figures:
    """Render each chat by ``apply_chat_template`` and tokenize the text."""
    return _in_processes(file, tokenizer, _by_template)


def xtuner(file: str, tokenizer: str) -> Figures:
    """Tokenize message by message."""
    return _in_processes(file, tokenizer, _by_message)


_TOKENIZER: Any = None


def _load(folder: str) -> None:
    global _TOKENIZER
    from transformers import AutoTokenizer

    _TOKENIZER = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    _TOKENIZER("warm up")


def _by_template(line: bytes) -> int:
    text = _TOKENIZER.apply_chat_template(json.loads(line)["messages"], tokenize=False)
    return len(_TOKENIZER(text, add_special_tokens=False)["input_ids"])


def _by_message(line: bytes) -> int:
    ids: list[int] = []
    labels: list[int] = []
    for message in json.loads(line)["messages"]:
        head = f"<|im_start|>{message['role']}\n"
        if message["role"] == "assistant":
            asked = _TOKENIZER.encode(head, add_special_tokens=False)
            said = _TOKENIZER.encode(message["content"] + "<|im_end|>\n", add_special_tokens=False)
            ids += asked + said
            labels += [-100] * len(asked) + said
        else:
            told = _TOKENIZER.encode(head + message["content"] + "<|im_end|>\n", add_special_tokens=False)
            ids += told
            labels += [-100] * len(told)
    return len(ids)


def _in_processes(file: str, tokenizer: str, function: Callable[[bytes], int]) -> Figures:
    lines = Path(file).read_bytes().splitlines()
    with get_context("spawn").Pool(CORES, _load, (tokenizer,)) as pool:
        pool.map(function, lines[: 4 * CORES], chunksize=1)  # every process has loaded its tokenizer
        start = time.perf_counter()
        tokens = sum(pool.imap_unordered(function, lines, chunksize=64))
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "bytes": os.path.getsize(file), "tokens": tokens}


PARTS: dict[str, Part] = {
    "packhouse": packhouse,
    "template_and_tokenizer": template_and_tokenizer,
    "xtuner": xtuner,
}


def speed(measured: Figures) -> Figures:
    """Add MB/s of source text."""
    return measured | {"mb_per_s": measured["bytes"] / measured["seconds"] / 1e6}


def show(figures: Figures) -> None:
    """Print the figures as a table."""
    table = Table("what", "input MB", "s", "MB/s", "Mtoken/s", title="Chats, JSON lines → committed shards with masks")
    for name in PARTS:
        one = figures[name]
        numbers = (one["bytes"] / 1e6, one["seconds"], one["mb_per_s"], one["tokens"] / one["seconds"] / 1e6)
        table.add_row(name, f"{numbers[0]:.0f}", *(f"{number:.2f}" for number in numbers[1:]))
    console = Console()
    console.print(table)
    console.print(
        f"{figures['times_template']:.1f} × apply_chat_template and tokenizer (goal 8), "
        f"{figures['times_xtuner']:.1f} × XTuner's way (goal 10)"
    )


def measure(folder: Path) -> Figures:
    """Run all parts and return their figures and ratios."""
    if not QWEN3.is_dir():
        raise Skipped(f"there is no tokenizer with a chat template in {QWEN3}")
    large, small = folder / "large.jsonl", folder / "small.jsonl"
    write_chats(large, OURS)
    write_chats(small, PEER)
    tokenizer = str(QWEN3)
    figures: Figures = {
        "cores": CORES,
        "packhouse": speed(apart("packhouse", str(large), tokenizer, str(folder / "store"))),
        "template_and_tokenizer": speed(apart("template_and_tokenizer", str(small), tokenizer)),
        "xtuner": speed(apart("xtuner", str(small), tokenizer)),
    }
    ours = figures["packhouse"]["mb_per_s"]
    figures["times_template"] = ours / figures["template_and_tokenizer"]["mb_per_s"]
    figures["times_xtuner"] = ours / figures["xtuner"]["mb_per_s"]
    return figures


if __name__ == "__main__":
    main("chats", PARTS, measure, show)
