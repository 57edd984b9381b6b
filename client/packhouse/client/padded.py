"""Layout padded: one row a segment, padded on the right, as plain Hugging Face models take it.

A row holds one segment only, because ``attention_mask`` cannot keep several apart. The padding tail of a pack is no
row. Labels are *not* shifted: these models shift them. So the label behind the last token of a piece, which lies in
another pack, is lost here; plan with strategy ``best_fit`` or ``soft`` and no sample is cut.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from packhouse.client.extra import as_data
from packhouse.client.pack import IGNORE, PADDING_ID, Pack

Rows = dict[str, Any]


def padded(packs: Sequence[Pack], step: int = 0, *, pad_id: int = PADDING_ID, multiple: int = 1) -> list[Rows]:
    """Return one dictionary for each pack, in order; all int64 (N, L), for N segments of up to L tokens.

    ``input_ids``, ``pad_id`` on padding; ``attention_mask``, 1 on tokens and 0 on padding; ``labels``, the token itself
    where it is trained, -100 elsewhere and at the start of a row; ``position_ids``, 0 to L - 1. L is rounded up to a
    ``multiple``. An empty pack is one row of padding, whose loss has no trained token to be a mean over. Where shards
    have extra columns, ``extra`` holds those of each row's sample, a list of dictionaries.
    """
    rows = [_rows(pack, pad_id, multiple) for pack in packs]
    for row, extra in zip(rows, as_data(packs).get("extra", ()), strict=False):
        row["extra"] = extra
    return rows


def _rows(pack: Pack, pad_id: int, multiple: int) -> Rows:
    tokens = pack.num_tokens
    ends = pack.cu_seqlens[pack.cu_seqlens <= tokens]
    lengths = np.diff(ends) if tokens else np.zeros(1, np.int32)
    width = -(-max(1, int(lengths.max())) // multiple) * multiple
    real = np.arange(width) < lengths[:, None]
    input_ids = np.full(real.shape, pad_id, np.int64)
    input_ids[real] = pack.input_ids[:tokens]
    targets = np.full(tokens, IGNORE, np.int64)
    targets[1:] = pack.labels[: max(0, tokens - 1)]
    targets[ends[:-1]] = IGNORE
    labels = np.full(real.shape, IGNORE, np.int64)
    labels[real] = targets
    position_ids = np.tile(np.arange(width, dtype=np.int64), (len(lengths), 1))
    arrays = {
        "input_ids": input_ids,
        "attention_mask": real.astype(np.int64),
        "labels": labels,
        "position_ids": position_ids,
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
