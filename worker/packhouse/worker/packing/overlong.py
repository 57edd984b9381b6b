"""What happens to samples longer than a pack: the same rule for every strategy, and every loss counted."""

from dataclasses import dataclass

import numpy as np

from packhouse.client.errors import InvalidRequest
from packhouse.client.wire import PlanSpec
from packhouse.worker.packing.segments import Int32


@dataclass(frozen=True, slots=True)
class Fitted:
    """The samples of one epoch after the overlong policy."""

    lengths: Int32
    """(samples,), the tokens of each that are to be packed; 0 leaves a sample out"""
    zero_length: int = 0
    """samples without a token"""
    truncated_samples: int = 0
    truncated_tokens: int = 0
    dropped_samples: int = 0
    dropped_tokens: int = 0


def fit(lengths: Int32, spec: PlanSpec) -> Fitted:
    """Apply ``spec.overlong`` to samples of ``lengths`` tokens, int32; raise ``InvalidRequest`` under ``error``.

    ``split`` leaves the lengths as they are: the strategy cuts.
    """
    empty = int(np.count_nonzero(lengths == 0))
    over = lengths > spec.pack_length
    count = int(np.count_nonzero(over))
    if not count or spec.overlong == "split":
        return Fitted(lengths, empty)
    if spec.overlong == "error":
        sample = int(np.argmax(over))
        raise InvalidRequest(
            f"pack_length {spec.pack_length} is shorter than sample {sample} ({lengths[sample]:,} tokens)",
            'raise it, or set overlong to "split"',
        )
    tokens = int(lengths[over].sum(dtype=np.int64))
    if spec.overlong == "drop":
        kept = np.where(over, np.int32(0), lengths)
        return Fitted(kept, empty, dropped_samples=count, dropped_tokens=tokens)
    kept = np.minimum(lengths, np.int32(spec.pack_length))
    return Fitted(kept, empty, truncated_samples=count, truncated_tokens=tokens - count * spec.pack_length)
