"""Cases of templates, masks and tokenizers that no other file holds, each by its number in the log of public reports.

Those that other files hold: B001, B003, B004, B007, B009, B010, B014 to B016, B020, B021, B029, B031, B032, B034, B035,
B039, B095, B097 and B098 in test_tokenize; B019 there and in test_lengths; B038 and B015 from tables in test_readers;
B095 and B097 in test_forms; B021's warning in test_recipe; B100 in test_pipeline.
"""

import time
from pathlib import Path
from typing import Any

import pytest
from tests.worker.crash import run_job

from packhouse.client.dataset import Options, PackedDataset
from packhouse.client.errors import InvalidRequest
from packhouse.client.plan import PlanFile
from packhouse.client.wire import JobSpec
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.plans import build_plan
from packhouse.worker.recipe import resolve


def test_b005_b022_an_end_is_trained_also_where_padding_has_its_id(
    tiny: Path, tmp_path: Path, memory_store: type[Any]
) -> None:
    """Labels come from lengths, not from ids; and the id on padding is the trainer's to say, in one place."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "bb"}\n')
    store = memory_store()
    made = run_job(store, JobSpec(sources=[str(tmp_path / "a.jsonl")], tokenizer=str(tiny)))
    plan = PlanFile.open(store, build_plan(store, PlanSpec(datasets=[made.dataset], pack_length=8)).id)
    for pad in (2, 0):
        ((data, labels),) = PackedDataset(plan, store, rank=0, world=1, options=Options(pad_id=pad))
        documents = {
            tuple(data["input_ids"][0, start:stop].tolist()): labels[0, start:stop].tolist()
            for start, stop in zip(data["cu_seqlens"][0], data["cu_seqlens"][0][1:], strict=False)
        }
        padding = (pad,) * 3
        assert documents == {(69, 2): [2, -100], (70, 70, 2): [70, 2, -100], padding: [-100] * 3}


@pytest.mark.parametrize("name", ["B013a", "B013b", "B013c"])
def test_b013_a_template_that_attacks_is_refused_by_name_when_the_job_comes_in(
    name: str, shared: Path, tiny: Path, memory_store: type[Any]
) -> None:
    source = (shared / "cases" / "inputs" / f"{name}.jinja").read_text()
    started = time.monotonic()
    with pytest.raises(InvalidRequest, match=r"chat template") as refusal:
        resolve(JobSpec(sources=["/x"], tokenizer=str(tiny), kind="chat", template=source), memory_store())
    assert time.monotonic() - started < 10
    assert "uid=" not in str(refusal.value)


INPUTS: dict[str, dict[str, Any]] = {
    "B003.jsonl": {"template": "B003.jinja"},
    "B009.jsonl": {"add_eos": False},
    "B010.jsonl": {"template": "tmpl_generation.jinja"},
    "B014.jsonl": {"template": "B014.jinja", "loss": "all"},
    "B015.jsonl": {"template": "B015.jinja", "loss": "all"},
    "B016.jsonl": {"template": "B015.jinja", "loss": "all"},
    "B032.jsonl": {"add_eos": False},
    "B035.jsonl": {"add_eos": False},
    "B039.jsonl": {"add_eos": False},
    "B097.jsonl": {"template": "tmpl_generation.jinja"},
    "base_chat.jsonl": {"template": "tmpl_generation.jinja"},
}
EXPECTED: dict[str, tuple[Any, Any]] = {
    "B003.jsonl": ([[37, 85, 85]], [[37]]),
    "B009.jsonl": ([[7, 37, 203, 3, 4, 203, 203, 7, 38], [225, 4, 225, 92]], None),
    "B010.jsonl": (None, [[177, 258, 251, 227, 83, 79, 4]]),
    "B032.jsonl": ([[69], [70]], None),
    "B035.jsonl": ([[ord(letter) - 28 for letter in day] for day in ["2024-01-02", "2024-01-03"]], None),
    "B039.jsonl": ([[69], [70], [71]], None),
    "B097.jsonl": (None, [[86, 21, 4, 86, 22, 4]]),
    "base_chat.jsonl": (
        [[1, 3, 89, 87, 73, 86, 203, 76, 77, 4, 203, 3, 69, 87, 87, 77, 87, 88, 69, 82, 88, 203, 83, 79, 4, 203]],
        [[83, 79, 4]],
    ),
}
TEXTS = {
    "B014.jsonl": ['[{"name": "f", "description": "查<天>&\'q\'"}]'],
    "B015.jsonl": ['"city"', '"n"'],
    "B016.jsonl": ['"t": "2025-08-01"', '"t": 1690876800'],
}


@pytest.mark.parametrize("file", INPUTS)
def test_the_inputs_of_the_log_have_the_outcomes_that_it_states(
    file: str, shared: Path, toolkit: Any, rows: Any
) -> None:
    folder = shared / "cases" / "inputs"
    fields: dict[str, Any] = dict(INPUTS[file])
    if "template" in fields:
        fields |= {"template": (folder / fields["template"]).read_text(), "kind": "chat"}
    kit = toolkit(folder / "tok_tiny", **fields)
    made = rows(kit, (folder / file).read_bytes())
    assert made.rejects == []
    ids, trained = EXPECTED.get(file, (None, None))
    assert ids is None or made.ids == ids
    assert trained is None or made.trained == trained
    for shown, row in zip(TEXTS.get(file, ()), made.ids, strict=file in TEXTS):
        text = bytes_of(row)
        assert shown in text
        assert "null" not in text
        assert not (file == "B015.jsonl" and any(other in text for other in TEXTS[file] if other != shown))


def bytes_of(ids: list[int]) -> str:
    """Return the text of ids of the log's tokenizer, by its table: bytes from 5 on, printable ones first."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    order = [*plain, *(byte for byte in range(256) if byte not in plain)]
    merged = {261: b"ab", 262: b":/", 263: b"abab", 264: b"  "}
    parts = [merged.get(token) or (bytes([order[token - 5]]) if token >= 5 else b"|") for token in ids]
    return b"".join(parts).decode()
