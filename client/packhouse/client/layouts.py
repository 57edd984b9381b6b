"""Layouts: the shapes in which the packs of a step are handed to a torch trainer.

``internevo`` is the layout of InternEvo's packed data loader (``use_packed_dataset = True``). Legend: M micro-batches
(``micro_num``), P tokens of a pack (``micro_bsz * seq_len``), S segments of a pack, its padding tail counted as one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from packhouse.client.errors import InvalidRequest
from packhouse.client.pack import Pack

Data = dict[str, Any]
Batch = list[Any]
"""``[data, labels]``: a list, because that is what InternEvo's engine and torch's DataLoader hand on."""


def load_batch(packs: Sequence[Pack], step: int = 0) -> Batch:
    """Return ``[data, labels]`` of one step in layout ``internevo``.

    ``data`` holds ``input_ids`` int64 (M, P); ``cu_seqlens``, a list of M int32 tensors (S + 1,); ``indexes`` int64
    (M, P), the position of each token in its segment; ``step``, a Python int. ``labels`` is int64 (M, P), already
    shifted: the next token, or -100.
    """
    data = {
        "input_ids": _rows([pack.input_ids for pack in packs]),
        "cu_seqlens": [torch.from_numpy(pack.cu_seqlens) for pack in packs],
        "indexes": _rows([pack.positions for pack in packs]),
        "step": step,
    }
    return [data, _rows([pack.labels for pack in packs])]


def load_micro_batch(batch: Sequence[Any], offset: int) -> tuple[Data, torch.Tensor]:
    """Return micro-batch ``offset`` of a step: M becomes 1 and ``cu_seqlens`` a list of one tensor."""
    data, labels = batch
    micro = {
        "input_ids": data["input_ids"][offset : offset + 1],
        "cu_seqlens": data["cu_seqlens"][offset : offset + 1],
        "indexes": data["indexes"][offset : offset + 1],
        "step": data["step"],
    }
    return micro, labels[offset : offset + 1]


def packed_data_normalizer(data: Data, labels: torch.Tensor) -> tuple[Data, torch.Tensor]:
    """Return one micro-batch as the model takes it; the arguments are left as they are.

    ``indexes`` becomes (P,), ``cu_seqlens`` one int32 tensor (S + 1,), and ``max_seqlen``, the longest segment in
    tokens with the padding tail counted as one, is added as a Python int. ``input_ids`` and ``labels`` stay (1, P).
    """
    (cu_seqlens,) = data["cu_seqlens"]
    normal = {
        **data,
        "cu_seqlens": cu_seqlens,
        "indexes": data["indexes"][0],
        "max_seqlen": int(cu_seqlens.diff().max()),
    }
    return normal, labels


def split_data_sequence_parallel(data: Data, labels: torch.Tensor, rank: int, size: int) -> tuple[Data, torch.Tensor]:
    """Return part ``rank`` of ``size`` of one normalized micro-batch, cut along the sequence; the arguments stay.

    ``input_ids`` and ``labels`` (B, T) become (B, T / size) and ``indexes`` (T,) becomes (T / size,). Where an unpacked
    micro-batch has no ``indexes``, those of the part are added, which starts at position ``rank * T / size``.
    ``cu_seqlens`` and ``max_seqlen`` stay whole, because attention sees the whole sequence. Raises ``InvalidRequest``
    for lengths that ``size`` does not divide.
    """
    length = labels.shape[1]
    if length % size:
        raise InvalidRequest(
            f"a sequence of {length} tokens cannot be cut equally over {size} ranks",
            f"use a pack length that is a multiple of {size}",
        )
    part = slice(rank * length // size, (rank + 1) * length // size)
    indexes = data.get("indexes")
    own = {
        **data,
        "input_ids": data["input_ids"][:, part],
        "indexes": torch.arange(part.start, part.stop, device=labels.device) if indexes is None else indexes[part],
    }
    return own, labels[:, part]


LAYOUTS: dict[str, Callable[[Sequence[Pack], int], Batch]] = {"internevo": load_batch}


def _rows(rows: Sequence[Any]) -> torch.Tensor:
    # One pack a step is common and needs no copy.
    if len(rows) == 1:
        return torch.from_numpy(rows[0]).unsqueeze(0)
    return torch.stack([torch.from_numpy(row) for row in rows])
