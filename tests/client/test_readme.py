"""What the READMEs say to do in each trainer, and to resume, runs as it stands."""

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packhouse.client import PackedDataset, PlanSpec, loader
from packhouse.client.plan import PlanFile
from packhouse.client.store import LocalStore
from packhouse.worker.plans import build_plan

ROOT = Path(__file__).parents[2]
README = (ROOT / "client" / "README.md").read_text(encoding="utf-8")


def example(trainer: str) -> str:
    """Return the code behind the paragraph of a trainer."""
    (found,) = re.findall(rf"^\*\*{trainer}\*\*.*?```python\n(.*?)```", README, flags=re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.fixture
def given(tmp_path: Path, write_dataset: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the examples begin with: an open plan of two steps, its store, and a place among the ranks."""
    monkeypatch.chdir(tmp_path)
    store = LocalStore(tmp_path / "store")
    dataset = write_dataset(store, [[number % 90 + 1] * 8 for number in range(16)], vocab_size=100)
    spec = PlanSpec(datasets=[dataset], pack_length=16, ranks=2, micro_batches=2, tail="drop")
    steps = PlanFile.open(store, build_plan(store, spec).id)
    assert steps.header.steps == 2
    names = {"PackedDataset": PackedDataset, "loader": loader, "steps": steps, "store": store}
    return names | {"rank": 0, "world": 1, "start_step": 0}


@pytest.mark.parametrize("trainer", ["InternEvo", "XTuner"])
def test_the_loop_of_a_trainer_runs(trainer: str, given: dict[str, Any]) -> None:
    exec(example(trainer).replace("workers=2", "workers=0"), given)  # processes have tests of their own
    assert given["labels"].numel() > 0


def test_the_hugging_face_trainer_takes_the_packs(given: dict[str, Any]) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=100, **shape))
    seen: list[int] = []
    model.register_forward_pre_hook(
        lambda _, __, given: seen.append(int(given["attention_mask"].sum())), with_kwargs=True
    )
    exec(example("Hugging Face Trainer"), given | {"model": model})
    assert (len(seen), sum(seen)) == (8, 16 * 8)


def test_a_run_resumes_on_fewer_ranks(given: dict[str, Any]) -> None:
    (code,) = re.findall(r"Resume on fewer GPUs.*?```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    begun = loader(PackedDataset(given["steps"], given["store"], rank=0, world=8))
    next(iter(begun))
    names = given | {"state": begun.state_dict()}
    exec(textwrap.dedent(code), names)
    assert [data["step"] for data, _ in names["batches"]] == [1]
