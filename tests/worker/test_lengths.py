"""Splitting and cutting: pieces carry their place, nothing is lost uncounted, and long documents take linear time."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhouse.client.format import data_path
from packhouse.worker.shards import write_shard


def test_a_long_record_becomes_pieces_with_their_row_and_place(
    toolkit: Any, rows: Any, tiny: Path, memory_store: Any
) -> None:
    import pyarrow as pa

    kit = toolkit(tiny, max_length=3, overflow="split")
    made = rows(kit, [{"text": "a"}, {"text": "xyzxyz"}, {"text": "xy"}])
    assert [len(ids) for ids in made.ids] == [2, 3, 3, 1, 3]
    assert (made.samples.rows.tolist(), made.samples.places.tolist()) == ([0, 1, 1, 1, 2], [0, 0, 3, 6, 0])
    assert (made.samples.split, made.samples.fragments, made.samples.truncated_tokens) == (1, 3, 0)
    store = memory_store()
    receipt = write_shard(store, "ab" * 16, made.samples, kit.vocab_size)
    assert receipt.records == receipt.rows - receipt.fragments + receipt.split + receipt.dropped
    batch = pa.ipc.open_file(store.open(data_path("ab" * 16))).get_batch(0)
    assert batch.column("offset").to_pylist() == [0, 0, 3, 6, 0]


def test_pieces_joined_are_the_whole(toolkit: Any, rows: Any, tiny: Path) -> None:
    whole = toolkit(tiny)

    @settings(max_examples=40)
    @given(st.lists(st.text("ab é", max_size=30), max_size=8), st.integers(1, 9))
    def check(texts: list[str], length: int) -> None:
        records = [{"text": text} for text in texts]
        kit = toolkit(tiny, max_length=length, overflow="split", fast=False)
        made, truth = rows(kit, records), rows(whole, records)
        joined: dict[int, list[int]] = {}
        for row, place, ids in zip(made.samples.rows, made.samples.places, made.ids, strict=True):
            assert len(joined.setdefault(int(row), [])) == place
            joined[int(row)] += ids
        assert list(joined.values()) == truth.ids

    check()


def test_a_piece_without_a_trained_token_is_left_out_and_counted(
    toolkit: Any, rows: Any, chat: Any, tiny: Path
) -> None:
    kit = toolkit(tiny, kind="chat", max_length=8, overflow="split")
    made = rows(kit, [chat("hi", "ok"), chat("q", "", roles=("user", "user"))])
    assert made.trained == [[83, 79], [4]]
    assert (made.samples.places.tolist(), made.samples.truncated_tokens) == ([16, 24], 16)
    assert (made.samples.split, made.samples.fragments) == (1, 2)
    assert [reject.reason for reject in made.rejects] == ["nothing_to_train"]


@pytest.mark.parametrize(("overflow", "ids"), [("truncate", [92, 93]), ("truncate_left", [94, 2])])
def test_a_cut_takes_the_side_that_is_asked_for(
    overflow: str, ids: list[int], toolkit: Any, rows: Any, tiny: Path
) -> None:
    made = rows(toolkit(tiny, max_length=2, overflow=overflow), [{"text": "xyz"}])
    assert (made.ids, made.samples.truncated, made.samples.truncated_tokens) == ([ids], 1, 2)


def test_records_without_a_token_to_train_are_dropped_where_that_is_the_rule(
    toolkit: Any, rows: Any, chat: Any, tiny: Path
) -> None:
    records = [chat("q", "a"), chat("q", roles=("user",)), chat("q" * 50, "a")]
    made = rows(toolkit(tiny, kind="chat", max_length=40, untrained="drop"), records)
    assert (len(made.ids), made.rejects, made.samples.dropped) == (1, [], 2)
    kept = rows(toolkit(tiny, kind="chat", max_length=40), records)
    assert [reject.reason for reject in kept.rejects] == ["nothing_to_train"] * 2


@pytest.mark.parametrize("fast", [True, False])
def test_b019_a_long_document_takes_time_in_line_with_its_length(
    fast: bool, shared: Path, toolkit: Any, rows: Any
) -> None:
    """No breaks at all, and eight times the text takes at most twice eight times the work."""
    kit = toolkit(shared / "data" / "tokenizers" / "qwen3", max_length=4096, overflow="split", fast=fast)
    for letters in ("ab", "_", "ab "):
        seconds = []
        for size in (250_000, 2_000_000):
            start = time.process_time()
            made = rows(kit, [{"text": letters * (size // len(letters))}, {"text": "short"}])
            seconds.append(time.process_time() - start)
            assert len(made.ids[-1]) == 2
            assert all(len(ids) <= 4096 for ids in made.ids)
            assert np.all(np.diff(made.samples.rows) >= 0)
        assert made.samples.engine == ("gigatoken" if fast else "huggingface")
        assert seconds[1] < 8 * seconds[0] * 2 + 0.1, letters
