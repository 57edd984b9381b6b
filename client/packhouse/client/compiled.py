"""The kernel compiled by numba: every token is read once and written once, and Python sees no segment."""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from packhouse.client.kernel import Flat, Segments
from packhouse.client.shards import OpenShards

Kernel = TypeVar("Kernel", bound=Callable[..., object])


def fill(segments: Segments, shards: OpenShards, length: int, sample_end: int, pad_id: int, out: Flat) -> int:
    """Write the packs; see ``kernel.Fill``."""
    given = segments.offsets, segments.shard, segments.row, segments.start, segments.length
    arrays = out.input_ids, out.labels, out.positions, out.cu_seqlens, out.longest
    return int(_fill(given, shards.table, length, sample_end, pad_id, arrays))


def _compiled(kernel: Kernel) -> Kernel:
    # numba refuses to cache where neither the package's folder nor the user's own is writable.
    try:
        return numba.njit(cache=True)(kernel)  # type: ignore[no-any-return]
    except RuntimeError:
        return numba.njit(kernel)  # type: ignore[no-any-return]


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(context: Any, address: Any) -> Any:
    """Turn an address into a pointer: a table of addresses is the one way to hand numba any number of arrays."""

    def generate(generator: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], generator.get_value_type(signature.return_type))

    return types.voidptr(address), generate


@_compiled
def _copy(source: Any, mask: Any, masked: bool, n: int, follows: bool, ids: Any, labels: Any, positions: Any) -> None:
    """Copy one segment of ``n`` tokens from the start of ``source``; bit ``k`` of ``mask`` belongs to its token k."""
    for j in range(n):
        ids[j] = source[j]
        positions[j] = j
    last = n if follows else n - 1
    if masked:
        for j in range(last):
            labels[j] = np.int64(source[j + 1]) if mask[j + 1] else -100
    else:
        for j in range(last):
            labels[j] = source[j + 1]
    if not follows:
        labels[n - 1] = -100


@_compiled
def _unpack(bits: Any, start: int, n: int, out: Any) -> None:
    for j in range(n):
        at = start + j
        out[j] = (bits[at >> 3] >> (at & 7)) & 1


@_compiled
def _touch(
    first: int, last: int, shard: Any, row: Any, start: Any, length: Any, table: Any, lefts: Any, ends: Any
) -> int:
    """Read a byte or two of every segment of a pack, so that the processor fetches them all at once and not in turn."""
    seen = 0
    for i in range(first, last):
        rows = carray(_pointer(table[shard[i], 0]), (row[i] + 2,), np.int64)
        lefts[i] = rows[row[i]] + start[i]
        # No further than the sample goes: whether the plan asks for more is looked at later.
        ends[i] = min(rows[row[i] + 1], lefts[i] + length[i])
    for i in range(first, last):
        _, tokens, bits, width = table[shard[i]]
        begin, end = lefts[i] * width, ends[i] * width
        source = carray(_pointer(tokens), (end,), np.uint8)
        for at in range(begin, min(end, begin + 1024), 64):
            seen += source[at]
        if bits and begin < end:
            seen += carray(_pointer(bits), ((lefts[i] >> 3) + 1,), np.uint8)[lefts[i] >> 3]
    return seen


@_compiled
def _place(entry: Any, left: int, n: int, follows: bool, mask: Any, ids: Any, labels: Any, positions: Any) -> None:
    """Copy ``n`` tokens from ``left`` on of the shard with the table's ``entry``; ``mask`` is space to work in."""
    _, tokens, bits, width = entry
    seen = n + 1 if follows else n
    if bits:
        _unpack(carray(_pointer(bits), (left + seen + 7 >> 3,), np.uint8), left, seen, mask)
    if width == 2:
        source = carray(_pointer(tokens), (left + seen,), np.uint16)[left:]
        _copy(source, mask, bits != 0, n, follows, ids, labels, positions)
    else:
        wide = carray(_pointer(tokens), (left + seen,), np.uint32)[left:]
        _copy(wide, mask, bits != 0, n, follows, ids, labels, positions)


@_compiled
def _pad(pad_id: int, ids: Any, labels: Any, positions: Any) -> None:
    for j in range(len(ids)):
        ids[j], labels[j], positions[j] = pad_id, -100, j


@_compiled
def _fill(segments: Any, table: Any, pack_length: int, sample_end: int, pad_id: int, out: Any) -> int:
    offsets, shard, row, start, length = segments
    ids, labels, positions, cu_seqlens, longest = out
    mask = np.empty(pack_length + 1, np.uint8)
    lefts, ends = np.empty(len(shard), np.int64), np.empty(len(shard), np.int64)
    border = touched = 0
    for pack in range(len(offsets) - 1):
        touched += _touch(offsets[pack], offsets[pack + 1], shard, row, start, length, table, lefts, ends)
        begin = at = pack * pack_length
        stop, most = begin + pack_length, 0
        cu_seqlens[border] = 0
        for i in range(offsets[pack], offsets[pack + 1]):
            left, n = lefts[i], length[i]
            rows = carray(_pointer(table[shard[i], 0]), (row[i] + 2,), np.int64)
            base, end = rows[row[i]], rows[row[i] + 1]
            if left + n > end:
                return i
            follows = left + n < min(end, base + sample_end)
            to = slice(at, at + n)
            _place(table[shard[i]], left, n, follows, mask, ids[to], labels[to], positions[to])
            at, border, most = at + n, border + 1, max(most, n)
            cu_seqlens[border] = at - begin
        if at < stop:
            _pad(pad_id, ids[at:stop], labels[at:stop], positions[at:stop])
            border, most = border + 1, max(most, stop - at)
            cu_seqlens[border] = pack_length
        border += 1
        longest[pack] = most
    # The sum is told, or the compiler would leave the reads out.
    return -1 if touched != -1 else -2
