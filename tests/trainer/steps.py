"""Steps built by hand in the `internevo` layout, so that these tests need no service and no store."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Step = tuple[dict[str, Any], Tensor]


def make_step(packs: Sequence[Sequence[Sequence[int]]], pack_length: int, untrained: Sequence[int] = ()) -> Step:
    """Every sample is a segment, the rest of a pack one more; labels are the next token of the same sample.

    Packs whose number is in `untrained` have no trained token.
    """
    input_ids = torch.zeros(len(packs), pack_length, dtype=torch.int64)
    indexes, labels, borders = torch.zeros_like(input_ids), torch.full_like(input_ids, -100), []
    for row, samples in enumerate(packs):
        edges = [0]
        for sample in samples:
            start, stop = edges[-1], edges[-1] + len(sample)
            input_ids[row, start:stop] = torch.tensor(sample)
            if row not in untrained:
                labels[row, start : stop - 1] = torch.tensor(sample[1:])
            edges.append(stop)
        edges += [pack_length] if edges[-1] < pack_length else []
        for start, stop in pairwise(edges):
            indexes[row, start:stop] = torch.arange(stop - start)
        borders.append(torch.tensor(edges, dtype=torch.int32))
    return {"input_ids": input_ids, "cu_seqlens": borders, "indexes": indexes}, labels


def random_samples(lengths: Sequence[int], vocab_size: int = 512, seed: int = 0) -> list[list[int]]:
    """One list of ids per length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]
