"""Layout xtuner: packs as XTuner V1's collators make them, and the hook for collators of one's own.

A step is a list with ``{"seq_ctx": SequenceContext, "shifted_labels": int64 (1, S)}`` for each micro-batch. It differs
from XTuner where that is wrong: no token is cut off a row's end, no label leads from one sample to the next, and a
piece that goes on in another pack keeps the label behind its last token.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from packhouse.client.errors import InvalidRequest
from packhouse.client.pack import IGNORE, PADDING_ID, Pack
from packhouse.client.sequence_context import SequenceContext, pad_ends

DataItem = dict[str, Any]
"""A segment: ``input_ids``, ``labels`` (not shifted) and ``shifted_labels``, int64 (n,), and ``num_tokens``, n; where
shards have extra columns, those of its sample, and what a runtime made of them."""
CollateItem = dict[str, Any]
CollateFn = Callable[[list[list[DataItem]], int, int], Any]
"""``(instances, pack_max_length, padding_token_idx)``: a list of segments for each micro-batch, to what is wanted."""


def collate(
    packs: Sequence[Pack], step: int = 0, *, pad_id: int = PADDING_ID, collate_fn: CollateFn | None = None
) -> Any:
    """Return one step in layout ``xtuner``, or what ``collate_fn`` makes of it."""
    length = len(packs[0].input_ids) if packs else 0
    return (collate_fn or text_collator)([data_items(pack) for pack in packs], length, pad_id)


def text_collator(
    instances: list[list[DataItem]], pack_max_length: int, padding_token_idx: int, pack_to_max_length: bool = True
) -> list[CollateItem]:
    """Return a context and its shifted labels for each micro-batch."""
    made = [build_text_ctx_labels(one, pack_max_length, padding_token_idx, pack_to_max_length) for one in instances]
    return [{"seq_ctx": context, "shifted_labels": labels} for context, labels in made]


def build_text_ctx_labels(
    instance: list[DataItem], pack_max_length: int, padding_token_idx: int = PADDING_ID, pack_to_max_length: bool = True
) -> tuple[SequenceContext, torch.Tensor]:
    """Return the context of the segments of one row and its labels int64 (1, S), shifted.

    The row is padded to ``pack_max_length``; without ``pack_to_max_length`` only an empty one is, to one token. Items
    without ``shifted_labels`` have their ``labels`` shifted within the item. Raises ``InvalidRequest`` for a row that
    is too long.
    """
    lengths = [len(item["input_ids"]) for item in instance]
    tokens = sum(lengths)
    if tokens > pack_max_length:
        raise InvalidRequest(
            f"a row of {tokens:,} tokens does not fit into {pack_max_length:,}", "raise pack_max_length"
        )
    size = pack_max_length if pack_to_max_length else max(1, tokens)
    input_ids = np.full(size, padding_token_idx, np.int64)
    labels = np.full(size, IGNORE, np.int64)
    ends = np.cumsum(lengths).tolist()
    for item, length, end in zip(instance, lengths, ends, strict=True):
        input_ids[end - length : end] = item["input_ids"]
        if "shifted_labels" in item:
            labels[end - length : end] = item["shifted_labels"]
        else:
            labels[end - length : end - 1] = item["labels"][1:]
    real_ends = [end for end, length in zip(ends, lengths, strict=True) if length]
    context = SequenceContext.from_row(
        torch.from_numpy(input_ids), [*real_ends, *pad_ends(tokens, size)], size - tokens
    )
    return context, torch.from_numpy(labels)[None]


def data_items(pack: Pack) -> list[DataItem]:
    """Return the segments of a pack, without its padding; the arrays are views on it."""
    targets = np.full(pack.num_tokens, IGNORE, np.int64)
    targets[1:] = pack.labels[: max(0, pack.num_tokens - 1)]
    ends = pack.cu_seqlens[pack.cu_seqlens <= pack.num_tokens].tolist()
    targets[ends[:-1]] = IGNORE
    extras = [one.values for one in pack.extras] or [{}] * (len(ends) - 1)
    return [
        {
            **extra,
            "input_ids": pack.input_ids[begin:end],
            "labels": targets[begin:end],
            "num_tokens": end - begin,
            "shifted_labels": pack.labels[begin:end],
        }
        for (begin, end), extra in zip(pairwise(ends), extras, strict=True)
    ]
