"""What happens to samples longer than a pack: the same rule for every strategy, and every loss counted."""

import numpy as np

from packhouse.client.errors import InvalidRequest
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.packing.compiled import compiled
from packhouse.worker.packing.segments import Int32, Int64


def fit(lengths: Int32, spec: PlanSpec) -> Int32:
    """Return the tokens to pack of samples of ``lengths`` tokens, int32, by ``spec.overlong``; 0 leaves a sample out.

    ``split`` leaves the lengths as they are: ``pieces.split`` cuts, or the strategy does. Raises ``InvalidRequest``
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


@compiled
def piece_counts(lengths: Int32, limit: int) -> Int64:
    """Return how many pieces of each length from 1 to ``limit`` the samples give, (limit + 1,); the first is 0."""
    counts = np.zeros(limit + 1, np.int64)
    for length in lengths:
        counts[limit] += length // limit
        counts[length % limit] += 1
    counts[0] = 0
    return counts
