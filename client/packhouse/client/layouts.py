"""Layouts: the shapes in which the packs of a step are handed to a torch trainer.

``internevo`` is that of InternEvo's packed loader (``use_packed_dataset = True``), ``internevo_unpacked`` that of its
unpacked one; ``xtuner`` and ``padded`` have files of their own. In both of InternEvo's the padding tail is a segment of
its own, behind all real ones. Legend: M micro-batches (``micro_num``), P tokens of a pack (``micro_bsz * seq_len``), S
segments of a pack, its padding tail counted as one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch

from packhouse.client.errors import InvalidRequest
from packhouse.client.extra import as_data
from packhouse.client.pack import IGNORE, PADDING_ID, Pack
from packhouse.client.padded import padded
from packhouse.client.plan import Int64
from packhouse.client.wire_plans import PlanSpec
from packhouse.client.xtuner import CollateFn, collate

Data = dict[str, Any]
Batch = list[Any]
"""``[data, labels]``: a list, because that is what InternEvo's engine and torch's DataLoader hand on."""

Layout = Callable[[Sequence[Pack], int], Any]
"""From a rank's packs of a step, and the step's number, to what the trainer is given."""

LayoutName = Literal["internevo", "internevo_unpacked", "xtuner", "padded"]
LAYOUTS: tuple[LayoutName, ...] = ("internevo", "internevo_unpacked", "xtuner", "padded")


def make_layout(
    layout: LayoutName | Layout, spec: PlanSpec, pad_id: int = PADDING_ID, collate_fn: CollateFn | None = None
) -> Layout:
    """Return the layout of that name for a plan's packs; one that is a function already is returned as it is.

    ``collate_fn`` takes the place of XTuner's own collator in layout ``xtuner``. Raises ``InvalidRequest`` for an
    unknown name, and for a collator without that layout.
    """
    if collate_fn is not None and layout != "xtuner":
        raise InvalidRequest(f"layout {layout!r} takes no collate_fn", 'set layout to "xtuner", or leave it out')
    if callable(layout):
        return layout
    if layout == "internevo":
        return load_batch
    if layout == "internevo_unpacked":
        return partial(load_unpacked_batch, seq_len=spec.seq_len or spec.pack_length)
    if layout == "padded":
        return partial(padded, pad_id=pad_id)
    if layout == "xtuner":
        return partial(collate, pad_id=pad_id, collate_fn=collate_fn)
    raise InvalidRequest(f"there is no layout {layout!r}", f"use one of {', '.join(LAYOUTS)}")


def load_batch(packs: Sequence[Pack], step: int = 0) -> Batch:
    """Return ``[data, labels]`` of one step in layout ``internevo``.

    ``data`` holds ``input_ids`` int64 (M, P); ``cu_seqlens``, a list of M int32 tensors (S + 1,); ``indexes`` int64
    (M, P), the position of each token in its segment; ``step``, a Python int. ``labels`` is int64 (M, P), already
    shifted: the next token, or -100. Where shards have extra columns, ``extra`` holds those of each segment: a list of
    M lists of dictionaries.
    """
    data = {
        "input_ids": _rows([pack.input_ids for pack in packs]),
        "cu_seqlens": _borders(packs),
        "indexes": _rows([pack.positions for pack in packs]),
        "step": step,
        **as_data(packs),
    }
    return [data, _rows([pack.labels for pack in packs])]


def load_unpacked_batch(packs: Sequence[Pack], step: int = 0, *, seq_len: int) -> Batch:
    """Return ``[data, labels]`` of one step in layout ``internevo_unpacked``: as ``load_batch``, to be unpacked later.

    Raises ``InvalidRequest`` for packs that ``unpack_data`` could not hold: more than ``P // seq_len`` samples, or one
    longer than ``seq_len``.
    """
    for pack in packs:
        lengths = pack.cu_seqlens[1:] - pack.cu_seqlens[:-1]
        real = lengths[: len(lengths) - (pack.num_tokens < len(pack.input_ids))]
        rows = len(pack.input_ids) // seq_len
        if len(real) > rows or real.max(initial=0) > seq_len:
            raise InvalidRequest(
                f"a pack of step {step} has {len(real)} samples of up to {real.max(initial=0)} tokens, and unpacked it "
                f"holds {rows} of {seq_len}",
                "build the plan with strategy internevo_unpacked",
            )
    return load_batch(packs, step)


def load_micro_batch(batch: Sequence[Any], offset: int) -> tuple[Data, torch.Tensor]:
    """Return micro-batch ``offset`` of a step: M becomes 1 and ``cu_seqlens`` a list of one tensor."""
    data, labels = batch
    micro = {
        "input_ids": data["input_ids"][offset : offset + 1],
        "cu_seqlens": data["cu_seqlens"][offset : offset + 1],
        "indexes": data["indexes"][offset : offset + 1],
        "step": data["step"],
        **({"extra": data["extra"][offset : offset + 1]} if "extra" in data else {}),
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


def unpack_data(data: Data, labels: torch.Tensor, seq_len: int) -> tuple[Data, torch.Tensor]:
    """Return one micro-batch of layout ``internevo_unpacked`` with a row for each sample; the arguments stay.

    ``input_ids`` and ``labels`` (1, P) become (P // seq_len, seq_len): row j is sample j, then padding (0 and -100); a
    row without a sample is all padding. ``cu_seqlens`` and ``indexes`` are left out: every row starts at position 0.
    """
    cu_seqlens = data["cu_seqlens"]
    ends = (cu_seqlens[0] if isinstance(cu_seqlens, list) else cu_seqlens).tolist()
    rows = labels.shape[1] // seq_len
    input_ids = labels.new_full((rows, seq_len), PADDING_ID)
    targets = labels.new_full((rows, seq_len), IGNORE)
    for row, (begin, end) in enumerate(pairwise(ends[: rows + 1])):
        # Only a padding tail is longer than a row, and it holds nothing but padding.
        size = min(end - begin, seq_len)
        input_ids[row, :size] = data["input_ids"][0, begin : begin + size]
        targets[row, :size] = labels[0, begin : begin + size]
    kept = {name: value for name, value in data.items() if name not in ("cu_seqlens", "indexes", "max_seqlen")}
    return {**kept, "input_ids": input_ids}, targets


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


def _rows(rows: Sequence[Int64]) -> torch.Tensor:
    """Return the rows as one tensor; without a copy where they lie end to end, as a builder's do."""
    first, count = rows[0], len(rows)
    places = [row.__array_interface__["data"][0] for row in rows]
    whole = first.base is not None and all(row.base is first.base for row in rows)
    if whole and places == [*range(places[0], places[0] + count * first.nbytes, first.nbytes)]:
        return torch.from_numpy(np.lib.stride_tricks.as_strided(first, (count, len(first)), (first.nbytes, 8)))
    return torch.from_numpy(np.stack(rows))


def _borders(packs: Sequence[Pack]) -> list[torch.Tensor]:
    # Parts of one tensor: between processes each tensor of its own would take an open file.
    joined = torch.from_numpy(np.concatenate([pack.cu_seqlens for pack in packs]))
    return list(torch.split(joined, [len(pack.cu_seqlens) for pack in packs]))
