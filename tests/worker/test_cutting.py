"""Cutting: blocks of the promised sizes, the same however a file is read, and changes that stay where they are made."""

import io
import json
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhouse.client.digest import digest_bytes
from packhouse.worker import cutting
from packhouse.worker.cutting import NoLineEnd, cut, width

NARROW, WIDE, SHARE = 1_000, 8_000, 32
DEFAULTS = {name: getattr(cutting, name) for name in ("NARROWEST", "WIDEST", "SHARE")}


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """Widths of 1,000 to 8,000 bytes: the last class begins at 256,000."""
    with pytest.MonkeyPatch.context() as patch:
        sizes = {"NARROWEST": NARROW, "WIDEST": WIDE, "SHARE": SHARE, "READ_AT_ONCE": 4_096}
        for name, value in sizes.items():
            patch.setattr(cutting, name, value)
        yield


def some_lines(count: int, seed: int = 0, longest: int = 300) -> list[bytes]:
    draw = random.Random(seed)
    return [b'{"text":"%x"}\n' % draw.getrandbits(draw.randint(1, longest)) for _ in range(count)]


def blocks_of(data: bytes, before: int = 0) -> list[bytes]:
    return [bytes(piece.data) for piece in cut(io.BytesIO(data), before)]


def new_blocks(data: bytes, known: list[bytes]) -> list[bytes]:
    seen = set(known)
    return [block for block in blocks_of(data) if block not in seen]


def test_blocks_are_the_file_cut_at_line_ends_between_the_sizes() -> None:
    data = b"".join(some_lines(12_000))
    blocks = blocks_of(data)
    assert b"".join(blocks) == data
    assert all(block.endswith(b"\n") for block in blocks)
    place = 0
    for block in blocks[:-1]:
        wide = width(place)
        place += len(block)
        assert wide <= len(block) <= 3 * wide
    assert 1.5 < np.mean([len(block) for block in blocks if len(block) >= WIDE]) / WIDE < 2.3


def test_widths_are_the_promised_share_of_what_precedes() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in DEFAULTS.items():
            patch.setattr(cutting, name, value)
        assert [width(size << 20) >> 20 for size in (0, 383, 384, 767, 768, 1536, 10_000)] == [1, 1, 2, 2, 4, 8, 8]


@pytest.mark.parametrize("longest", [20, 800, 8_000])
def test_short_and_long_lines_make_blocks_of_one_mean_size(longest: int) -> None:
    blocks = blocks_of(b"".join(some_lines(8_000_000 // (longest // 8 + 12), longest=longest))[:4_000_000], 10**6)
    assert 1.6 < np.mean([len(block) for block in blocks]) / WIDE < 2.2


def test_lines_are_counted_over_blocks() -> None:
    data = b"\n\n".join(some_lines(4_000)) + b"last"
    pieces = [(bytes(piece.data), piece.lines) for piece in cut(io.BytesIO(data))]
    assert [lines for _, lines in pieces[:-1]] == [block.count(b"\n") for block, _ in pieces[:-1]]
    assert pieces[-1][1] == pieces[-1][0].count(b"\n") + 1
    assert json.dumps([lines for _, lines in pieces]), "plain numbers"


@given(st.lists(st.binary(max_size=200), max_size=60), st.booleans(), st.integers(1, 97), st.integers(10, 400))
def test_any_bytes_come_back_whole_and_cuts_do_not_depend_on_how_they_are_read(
    parts: list[bytes], ended: bool, at_once: int, narrow: int
) -> None:
    data = b"\n".join(parts) + (b"\n" if ended else b"")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "NARROWEST", narrow)
        whole = [(bytes(piece.data), piece.lines) for piece in cut(io.BytesIO(data))]
        patch.setattr(cutting, "READ_AT_ONCE", at_once)
        assert [(bytes(piece.data), piece.lines) for piece in cut(io.BytesIO(data))] == whole
    assert b"".join(block for block, _ in whole) == data
    assert all(block.endswith(b"\n") for block, _ in whole[:-1])
    assert all(
        lines == len(block.splitlines()) or b"\r" in block or lines == block.count(b"\n") + (block[-1:] != b"\n")
        for block, lines in whole
    )


def by_definition(data: bytes) -> list[bytes]:
    """Cut as the module's text says, with everything at hand."""
    line_ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 10) + 1
    begins = np.concatenate([[0], line_ends[:-1]])
    ranks = cutting.rank(np.frombuffer(data + bytes(8), np.uint8), begins, line_ends - 1).tolist()
    ends = line_ends.tolist()

    def peak(line: int) -> bool:
        end, wide = ends[line], width(ends[line])
        behind = [ranks[other] for other in range(line) if end - wide <= ends[other]]
        ahead = [ranks[other] for other in range(line + 1, len(ends)) if ends[other] <= end + wide]
        return max(behind, default=-1) < ranks[line] >= max(ahead, default=-1) and end + wide <= len(data)

    blocks, start = [], 0
    while start < len(data):
        wide = width(start)
        limit = start + 3 * wide
        some = [line for line in range(len(ends)) if start + wide <= ends[line] <= limit]
        stop = next((ends[line] for line in some if peak(line)), None)
        if stop is None and len(data) <= limit + width(limit):
            stop = len(data)
        elif stop is None:
            near = [line for line in some if start + wide < ends[line] <= start + 2 * wide]
            stop = ends[max(near, key=lambda line: ranks[line])]
        blocks.append(data[start:stop])
        start = stop
    return blocks


@settings(max_examples=12)
@given(st.integers(0, 10**6))
def test_cuts_are_those_of_the_definition_over_the_borders_between_widths(seed: int) -> None:
    data = b"".join(some_lines(2_000, seed))
    assert len(data) > SHARE * 2_048 + 3 * WIDE, "the width doubles within"
    assert blocks_of(data) == by_definition(data)


def test_a_line_longer_than_a_block_is_not_cut() -> None:
    huge = b'{"text":"' + b"x" * 300_000 + b'"}\n'
    blocks = blocks_of(b"".join([*some_lines(300), huge, *some_lines(300)]))
    assert [huge in block for block in blocks].count(True) == 1
    assert blocks_of(huge) == [huge]
    assert len(blocks_of(huge * 3)) == 3


def test_lines_without_any_difference_are_cut_all_the_same() -> None:
    blocks = blocks_of(b"{}\n" * 100_000)
    assert max(map(len, blocks)) <= 4 * WIDE
    assert len(set(blocks)) < 10, "what is the same is the same block"


def test_a_line_without_an_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "MAX_LINE", 50_000)
    with pytest.raises(NoLineEnd, match="within 50,000 bytes"):
        list(cut(io.BytesIO(b"{}\n" + b"x" * 200_000)))


@given(st.integers(0, 10**6), st.integers(1, 12_000), st.binary(max_size=30))
def test_an_append_changes_only_the_last_block(seed: int, count: int, last: bytes) -> None:
    data = b"".join(some_lines(count, seed)) + last.replace(b"\n", b"")
    before = blocks_of(data)
    after = blocks_of(data + b"".join(some_lines(300, seed + 1)))
    assert after[: len(before) - 1] == before[:-1]
    assert len(before[-1]) <= 5 * width(len(data))


@given(st.integers(0, 10**6), st.floats(0, 1), st.integers(0, 400), st.booleans())
def test_an_inserted_or_deleted_line_changes_its_neighbourhood(
    seed: int, place: float, size: int, insert: bool
) -> None:
    """Three blocks at the very most, but where a line changes sides of a border between widths."""
    lines = some_lines(9_000, seed)
    before, line = blocks_of(b"".join(lines)), int(place * (len(lines) - 1))
    more = [b"%x\n" % random.Random(seed).getrandbits(8 * size)] if insert and size else []
    edited = b"".join([*lines[:line], *more, *lines[line + (not more) :]])
    fresh = new_blocks(edited, before)
    assert len(fresh) <= 3 or _at_borders(edited, fresh)
    assert sum(map(len, fresh)) <= 16 * WIDE


def _at_borders(data: bytes, fresh: list[bytes]) -> bool:
    borders = [SHARE * wide for wide in (2_048, 4_096, 8_192)]
    places = [data.index(block) for block in fresh]
    return any(place - 3 * WIDE <= border <= place + 3 * WIDE for place in places for border in borders)


def test_an_edit_costs_little_more_than_one_block_on_average() -> None:
    lines = some_lines(9_000)
    before = blocks_of(b"".join(lines))
    fresh = [
        len(new_blocks(b"".join([*lines[:at], b'{"new":%d}\n' % at, *lines[at:]]), before))
        for at in range(0, 9_000, 60)
    ]
    assert max(fresh) <= 2
    assert np.mean(fresh) < 1.2


def test_what_was_cut_once_is_cut_so_on_any_machine() -> None:
    """A golden value: another cut would make every remembered list, and every shard of it, a miss."""
    data = b"".join(b'{"text":"%064x"}\n' % (value * 0x9E3779B97F4A7C15) for value in range(20_000))
    assert (
        digest_bytes(b",".join(b"%d" % len(block) for block in blocks_of(data))) == "90c350e5b22c2ab7e4466cae2250aa71"
    )
