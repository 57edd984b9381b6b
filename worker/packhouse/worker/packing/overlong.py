"""What happens to samples longer than a pack: the same rule for every strategy, and every loss counted."""

from dataclasses import dataclass

import numpy as np

from packhouse.client.errors import InvalidRequest
from packhouse.client.wire import PlanSpec
from packhouse.worker.packing.compiled import compiled
from packhouse.worker.packing.segments import Ids, Int32, Int64, narrow


@dataclass(frozen=True, slots=True)
class Pieces:
    """Samples cut into pieces that fit, in the order of the samples."""

    sample: Ids
    """(pieces,)"""
    start: Int32
    """(pieces,)"""
    length: Int32
    """(pieces,)"""
    first: Ids
    """(samples + 1,), the pieces of sample i are ``first[i]:first[i + 1]``"""

    def of(self, order: Ids) -> Ids:
        """Return the pieces of the samples ``order``, in that order."""
        return _pieces_of(self.first, order)


def fit(lengths: Int32, spec: PlanSpec) -> Int32:
    """Return the tokens to pack of samples of ``lengths`` tokens, int32, by ``spec.overlong``; 0 leaves a sample out.

    ``split`` leaves the lengths as they are: ``split`` below cuts, or the strategy does. Raises ``InvalidRequest``
    under ``error``.
    """
    limit = spec.sample_limit
    if len(lengths) == 0 or lengths.max() <= limit or spec.overlong == "split":
        return lengths
    if spec.overlong == "error":
        sample = int(np.argmax(lengths > limit))
        name = "pack_length" if limit == spec.pack_length else "seq_len"
        raise InvalidRequest(
            f"{name} {limit} is shorter than sample {sample} ({lengths[sample]:,} tokens)",
            'raise it, or set overlong to "split"',
        )
    if spec.overlong == "drop":
        return np.where(lengths > limit, np.int32(0), lengths)
    return np.minimum(lengths, np.int32(limit))


def split(lengths: Int32, limit: int) -> Pieces | None:
    """Return samples of ``lengths`` tokens in pieces of ``limit``, the last one of the rest; None if all are whole."""
    if len(lengths) == 0 or lengths.max() <= limit:
        return None
    count = int(_piece_count(lengths, limit))
    kind = narrow(max(count, len(lengths)) + 1)
    first: Ids = np.zeros(len(lengths) + 1, kind)
    sample: Ids = np.empty(count, kind)
    start, length = np.empty(count, np.int32), np.empty(count, np.int32)
    _split(lengths, limit, first, sample, start, length)
    return Pieces(sample, start, length, first)


@compiled
def _piece_count(lengths: Int32, limit: int) -> int:
    count = 0
    for length in lengths:
        count += -(-length // limit)
    return count


@compiled
def _split(lengths: Int32, limit: int, first: Ids, sample: Ids, start: Int32, length: Int32) -> None:
    at = 0
    for i in range(len(lengths)):
        for begin in range(0, lengths[i], limit):
            sample[at], start[at], length[at] = i, begin, min(lengths[i] - begin, limit)
            at += 1
        first[i + 1] = at


@compiled
def _pieces_of(first: Ids, order: Ids) -> Ids:
    count = 0
    for sample in order:
        count += first[sample + 1] - first[sample]
    pieces = np.empty(count, first.dtype)
    at = 0
    for sample in order:
        for piece in range(first[sample], first[sample + 1]):
            pieces[at] = piece
            at += 1
    return pieces


@compiled
def piece_counts(lengths: Int32, limit: int) -> Int64:
    """Return how many pieces of each length from 1 to ``limit`` the samples give, (limit + 1,); the first is 0."""
    counts = np.zeros(limit + 1, np.int64)
    for length in lengths:
        counts[limit] += length // limit
        counts[length % limit] += 1
    counts[0] = 0
    return counts
