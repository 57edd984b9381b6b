"""Long documents: whoever has none does not wait for those of others."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.worker.test_pipeline import Memory, Place, Wrapped

from packhouse.client.format import read_manifest
from packhouse.client.store import LocalStore
from packhouse.worker.executor import Executor
from packhouse.worker.pipeline import Outcome


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_b019_other_jobs_go_on_beside_a_document_that_takes_long(
    tmp_path: Path, tokenizer_dir: Path, executor: Executor
) -> None:
    """The worker with the document holds it until the other job has ended, and gets through it afterwards."""
    ended = tmp_path / "ended"
    began = tmp_path / "began"

    def held(function: Callable[..., Any], store: Any, recipe: Any, blocks: Any, *rest: Any, **options: Any) -> Any:
        if any(block.length > 1_000_000 for block in blocks):
            began.touch()
            deadline = time.monotonic() + 60
            while not ended.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert ended.exists(), "the other job waited for this one"
        return function(store, recipe, blocks, *rest, **options)

    short = [f"row {index}" for index in range(100)]
    store, kept = LocalStore(tmp_path / "store"), Memory()
    slow = Place(store, kept, Wrapped(executor, held), tokenizer_dir, [])
    quick = Place(store, kept, executor, tokenizer_dir, [])
    long = write(tmp_path / "long.jsonl", [*short, "ab" * 1_000_000, "_" * 2_000_000, *short])
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(slow.run(long)))
    thread.start()
    while not began.exists() and thread.is_alive():
        time.sleep(0.01)
    other = quick.run(write(tmp_path / "short.jsonl", short))
    assert read_manifest(store, other.dataset_id).rows == 100
    assert not outcomes
    ended.touch()
    thread.join(120)
    (outcome,) = outcomes
    assert read_manifest(store, outcome.dataset_id).rows == 202
    assert slow.last.phase == "done"
