"""Preview in this process: which records it shows."""

from pathlib import Path
from typing import Any

from packhouse.client.wire import JobSpec, PreviewSpec
from packhouse.worker.preview import preview


def test_the_first_records_are_those_of_the_first_file_with_any(
    tiny: Path, tmp_path: Path, memory_store: type[Any]
) -> None:
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "b.jsonl").write_text('{"text": "ab"}\n{"text": "b"}\n')
    spec = PreviewSpec(job=JobSpec(sources=[str(tmp_path)], tokenizer=str(tiny)), records=1)
    shown = preview(spec, memory_store())
    assert shown.source == str(tmp_path / "b.jsonl")
    assert [sample.ids for sample in shown.samples] == [[261, 2]]
