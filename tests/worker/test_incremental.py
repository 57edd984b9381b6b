"""Incremental work: a change of a source costs its neighbourhood, and what is the same is never made twice."""

import json
import random
import shutil
import sys
from pathlib import Path

import pytest
from tests.worker.cache_place import CachePlace, Memory, settle

from packhouse.client.format import read_manifest
from packhouse.client.store import LocalStore
from packhouse.worker import cutting


@pytest.fixture
def place(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> CachePlace:
    """Widths a five-hundredth of the real ones: a file of 400 kB is cut like one of 200 MB."""
    for name, value in {"NARROWEST": 2_000, "WIDEST": 16_000}.items():
        monkeypatch.setattr(cutting, name, value)
    return CachePlace(LocalStore(tmp_path / "store"), tiny)


def some_lines(size: int, seed: int = 0) -> list[str]:
    draw, lines, done = random.Random(seed), [], 0
    while done < size:
        lines.append(json.dumps({"text": f"{draw.getrandbits(draw.randint(8, 900)):x}"}) + "\n")
        done += len(lines[-1])
    return lines


def put(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(lines))
    settle(path)
    return path


def encoded_bytes(place: CachePlace) -> int:
    return sum(miss.bytes for miss in place.last.why)


def test_one_percent_more_costs_at_most_three(place: CachePlace, tmp_path: Path) -> None:
    lines = some_lines(400_000)
    path = put(tmp_path / "a.jsonl", lines)
    place.run(path)
    cold, blocks = encoded_bytes(place), place.last.blocks
    assert cold == path.stat().st_size
    assert blocks >= 10
    shares = []
    for step in range(8):
        lines += some_lines(path.stat().st_size // 100, seed=step + 1)
        put(path, lines)
        place.run(path)
        shares.append(encoded_bytes(place) / cold)
    assert max(shares) < 0.03, shares


@pytest.mark.parametrize("where", [0.02, 0.31, 0.5, 0.77, 0.98])
@pytest.mark.parametrize("edit", ["insert", "delete"])
def test_a_line_in_the_middle_costs_its_neighbourhood(
    place: CachePlace, tmp_path: Path, where: float, edit: str
) -> None:
    lines = some_lines(400_000)
    path = put(tmp_path / "a.jsonl", lines)
    place.run(path)
    at = int(where * len(lines))
    lines[at : at + (edit == "delete")] = [] if edit == "delete" else ['{"text": "new"}\n']
    put(path, lines)
    outcome = place.run(path)
    assert 1 <= sum(place.last.misses.values()) <= 2
    fresh = CachePlace(LocalStore(tmp_path / "fresh"), place.tokenizer)
    assert fresh.run(path) == outcome


def test_a_renamed_or_copied_file_and_the_same_file_in_another_dataset_are_all_hits(
    place: CachePlace, tmp_path: Path
) -> None:
    path, other = put(tmp_path / "a.jsonl", some_lines(60_000)), put(tmp_path / "o.jsonl", some_lines(9_000, seed=5))
    first = place.run(path)
    place.run(other)
    shutil.copy(path, tmp_path / "copy.jsonl")
    path.rename(tmp_path / "renamed.jsonl")
    settle(tmp_path / "copy.jsonl", tmp_path / "renamed.jsonl")
    for name in ("copy", "renamed"):
        assert place.run(tmp_path / f"{name}.jsonl").dataset_id == first.dataset_id
        assert (place.last.misses, place.last.hits) == ({}, place.last.blocks)
    both = place.run(other, tmp_path / "copy.jsonl")
    assert place.last.misses == {}
    assert both.dataset_id != first.dataset_id


def test_b102_a_folder_is_read_in_the_order_of_its_names_wherever_and_whenever_they_were_made(
    place: CachePlace, tmp_path: Path
) -> None:
    names, datasets = ["a", "b", "A10"], set()
    for folder, order in (("one", names), ("two", names[::-1])):
        (tmp_path / folder).mkdir()
        for name in order:
            put(tmp_path / folder / f"{name}.jsonl", [json.dumps({"text": name}) + "\n"])
        outcome = place.run(tmp_path / folder)
        assert [Path(block["source"]).stem for block in outcome.blocks] == ["A10", "a", "b"]
        datasets.add(outcome.dataset_id)
    assert len(datasets) == 1


def test_a_warm_job_opens_no_source_and_asks_its_memory_a_fixed_number_of_times(
    place: CachePlace, tmp_path: Path
) -> None:
    opened: list[str] = []
    sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)

    def warm(count: int) -> int:
        folder = tmp_path / str(count)
        folder.mkdir()
        paths = [folder / f"{index}.jsonl" for index in range(count)]
        for index, path in enumerate(paths):
            path.write_text(f'{{"text": "{count} {index}"}}\n')
        settle(*paths)
        place.run(folder)
        assert opened.count(str(paths[0])) > 1, "they are seen"
        opened.clear()
        place.index.asked = 0
        place.run(folder)
        assert (place.last.bytes_read, place.last.hits) == (0, count)
        assert not [path for path in opened if path.endswith(".jsonl")]
        return place.index.asked

    assert warm(3) == warm(40) <= 6


def test_a_lost_memory_costs_a_scan_and_nothing_else(place: CachePlace, tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", some_lines(20_000))
    outcome = place.run(path)
    place.index = Memory()
    assert place.run(path) == outcome
    assert (place.last.misses, place.last.bytes_read) == ({}, path.stat().st_size)
    assert read_manifest(place.store, outcome.dataset_id).rows == place.last.rows
