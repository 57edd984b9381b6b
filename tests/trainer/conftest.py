"""Steps built by hand in the `internevo` layout, so that these tests need no service and no store."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Step = tuple[dict[str, Any], Tensor]


@pytest.fixture
def make_step() -> Callable[..., Step]:
    """make_step(packs, pack_length): packs of samples of ids; see `_step`."""
    return _step


@pytest.fixture
def random_samples() -> Callable[..., list[list[int]]]:
    """random_samples(lengths, vocab_size=512, seed=0): one list of ids per length."""
    return _random_samples


def _step(packs: Sequence[Sequence[Sequence[int]]], pack_length: int, untrained: Sequence[int] = ()) -> Step:
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


def _random_samples(lengths: Sequence[int], vocab_size: int = 512, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the size of the largest tensor that any operation returns, backward included, by dtype."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor):
                self.numel[x.dtype] = max(self.numel.get(x.dtype, 0), x.numel())
        return out


@pytest.fixture
def largest_tensor() -> LargestTensor:
    """A context whose `numel[dtype]` is the size of the largest tensor made inside it."""
    return LargestTensor()
