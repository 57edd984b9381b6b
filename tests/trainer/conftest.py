"""What the trainer's tests share: steps built by hand, processes for distributed cases, and a memory meter."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.trainer import steps
from tests.trainer.pool import Pool
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WORLD = 8
"""The largest world that is tested."""


@pytest.fixture(name="make_step")
def _make_step() -> Callable[..., steps.Step]:
    """make_step(packs, pack_length): packs of samples of ids; see `steps.make_step`."""
    return steps.make_step


@pytest.fixture(name="random_samples")
def _random_samples() -> Callable[..., list[list[int]]]:
    """random_samples(lengths, vocab_size=512, seed=0): one list of ids per length."""
    return steps.random_samples


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Processes for distributed cases: `pool.run(world, case, *args)`."""
    started = Pool(WORLD, tmp_path_factory.mktemp("pool"))
    yield started
    started.close()


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
