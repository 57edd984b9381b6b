"""What the trainer's tests share: steps built by hand, processes for distributed cases, and a memory meter."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer import steps
from tests.trainer.pool import Pool
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from packhouse.client.store import LocalStore
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.plans import build_plan

# On busy cores several threads of one process wait for each other longer than they compute.
torch.set_num_threads(1)

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


@dataclass(frozen=True, slots=True)
class Corpus:
    """A plan over real text, in a store on disk."""

    store: Path
    plan: str
    vocab_size: int


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path, write_dataset: Callable[..., str]) -> Corpus:
    """This project's own sources, tokenized, stored and planned: over 56 steps of 2 packs, in 2 epochs."""
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    sources = sorted(Path(steps.__file__).parent.glob("*.py"))
    samples = [tokenizer.encode(path.read_text(encoding="utf-8")[:900]).ids for path in sources]
    store = LocalStore(tmp_path_factory.mktemp("corpus"))
    dataset = write_dataset(store, samples, vocab_size=tokenizer.get_vocab_size())
    plan = build_plan(store, PlanSpec(datasets=[dataset], pack_length=96, ranks=2, epochs=2))
    assert plan.report.steps >= 56
    return Corpus(store.root, plan.id, tokenizer.get_vocab_size())


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
