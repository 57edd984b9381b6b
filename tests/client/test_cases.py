"""Reports of other loaders' faults, by their numbers in the list of cases: none of them is to be found here.

The batches of one small pack are checked as every layout gives them: documents ``11 12 13`` and ``21 22`` in rows of
eight, with 2 for padding.
"""

import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from packhouse.client import loader
from packhouse.client.dataset import Options, PackedDataset
from packhouse.client.layouts import load_micro_batch, packed_data_normalizer, unpack_data
from packhouse.client.padded import padded
from packhouse.client.plan import PlanFile
from packhouse.client.store import LocalStore
from packhouse.client.wire_plans import PlanSpec
from packhouse.worker.plans import build_plan

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

Build = Callable[..., PlanFile]
DOCUMENTS = [[11, 12, 13], [21, 22]]
LABELS = [12, 13, -100, 22, -100, -100, -100, -100]


@pytest.fixture
def build(tmp_path: Path, write_dataset: Callable[..., str]) -> Build:
    def made(documents: list[list[int]], **spec: Any) -> PlanFile:
        store = LocalStore(tmp_path)
        request = PlanSpec(datasets=[write_dataset(store, documents)], **{"pack_length": 8, "seed": None, **spec})
        return PlanFile.open(store, build_plan(store, request).id)

    return made


Batches = Callable[..., list[Any]]


@pytest.fixture(params=["numba", "numpy"])
def batches(request: pytest.FixtureRequest) -> Batches:
    """A function (plan, layout) -> batches, by each kernel."""

    def made(plan: PlanFile, layout: Any = "internevo") -> list[Any]:
        options = Options(pad_id=2, kernel=request.param)
        return list(PackedDataset(plan, plan.store, layout=layout, options=options))

    return made


def test_b051_positions_start_anew_in_every_document_and_in_the_padding(build: Build, batches: Batches) -> None:
    ((data, _),) = batches(build(DOCUMENTS, strategy="internevo"))
    assert data["input_ids"].tolist() == [[11, 12, 13, 21, 22, 2, 2, 2]]
    assert data["indexes"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert data["cu_seqlens"][0].tolist() == [0, 3, 5, 8]
    ((item,),) = batches(build(DOCUMENTS, strategy="internevo"), "xtuner")
    assert item["seq_ctx"].position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    ((rows,),) = batches(build(DOCUMENTS, strategy="internevo"), "padded")
    assert rows["position_ids"].tolist() == [[0, 1, 2], [0, 1, 2]]


def test_b052_a_row_padded_to_a_multiple_is_as_long_in_every_array(build: Build, batches: Batches) -> None:
    ((rows,),) = batches(
        build(DOCUMENTS, strategy="internevo", pack_length=5), lambda packs, step: padded(packs, step, multiple=8)
    )
    assert {name: list(array.shape) for name, array in rows.items()} == {name: [2, 8] for name in rows}
    assert rows["position_ids"].tolist() == [[*range(8)]] * 2


@pytest.mark.parametrize("layout", ["internevo", "xtuner"])
def test_b054_a_documents_last_token_learns_nothing_of_the_next(build: Build, batches: Batches, layout: Any) -> None:
    (batch,) = batches(build(DOCUMENTS, strategy="internevo"), layout)
    labels = batch[1] if layout == "internevo" else batch[0]["shifted_labels"]
    assert labels.tolist() == [LABELS]


def loss(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def test_b055_labels_are_shifted_once_or_left_to_the_model(build: Build, batches: Batches) -> None:
    """A model that knows each next token has no loss, and one that copies its input has some, by every layout."""
    plan = build([[11, 12, 13, 14], [21, 22, 23]], strategy="internevo")
    ((data, labels),), ((item,),), ((rows,),) = (batches(plan, layout) for layout in ("internevo", "xtuner", "padded"))
    shifted = [(data["input_ids"], labels), (item["seq_ctx"].input_ids, item["shifted_labels"])]
    # Hugging Face's models shift by themselves: logits of all tokens but the last, labels of all but the first.
    shifted.append((rows["input_ids"][:, :-1], rows["labels"][:, 1:]))
    for ids, targets in shifted:
        assert loss(100.0 * torch.nn.functional.one_hot(ids + 1, 32), targets) < 1e-6
        assert loss(100.0 * torch.nn.functional.one_hot(ids, 32), targets) > 10


@pytest.mark.parametrize("pack_length", [8, 5])
def test_b057_borders_are_int32_and_end_at_the_number_of_ids(build: Build, batches: Batches, pack_length: int) -> None:
    ((data, labels),) = batches(build(DOCUMENTS, strategy="internevo", pack_length=pack_length))
    normal, _ = packed_data_normalizer(*load_micro_batch([data, labels], 0))
    ends = normal["cu_seqlens"]
    assert (ends.dtype, ends.ndim, len(ends)) == (torch.int32, 1, 4 if pack_length == 8 else 3)
    assert (int(ends[0]), int(ends[-1])) == (0, normal["input_ids"].numel())
    ((item,),) = batches(build(DOCUMENTS, strategy="internevo", pack_length=pack_length), "xtuner")
    context = item["seq_ctx"]
    for ends in (context.cu_seq_lens_q, context.cu_seq_lens_k):
        assert (ends.dtype, ends.ndim, int(ends[-1])) == (torch.int32, 1, context.input_ids.numel())


@pytest.mark.parametrize("documents", [[[11], [], [21], []], [[11], [21], [31], [41]]])
def test_b058_no_segment_is_empty(build: Build, batches: Batches, documents: list[list[int]]) -> None:
    ((data, labels),) = batches(build(documents, strategy="internevo", pack_length=4))
    normal, _ = packed_data_normalizer(*load_micro_batch([data, labels], 0))
    assert (normal["cu_seqlens"].diff() > 0).all()
    assert normal["max_seqlen"] == int(normal["cu_seqlens"].diff().max()) >= 1


def test_b107_the_mask_and_the_positions_are_those_of_each_row(build: Build, batches: Batches) -> None:
    documents = [[11, 12], [21, 22, 23, 24, 25]]
    ((rows,),) = batches(build(documents, strategy="internevo", pack_length=7), "padded")
    assert rows["attention_mask"].tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert rows["position_ids"].tolist() == [[*range(5)]] * 2
    plan = build(documents, strategy="internevo_unpacked", pack_length=10, seq_len=5)
    ((data, labels),) = batches(plan, "internevo_unpacked")
    unpacked, targets = unpack_data(*load_micro_batch([data, labels], 0), seq_len=5)
    assert unpacked["input_ids"].tolist() == [[11, 12, 0, 0, 0], [21, 22, 23, 24, 25]]
    assert targets.tolist() == [[12, -100, -100, -100, -100], [22, 23, 24, 25, -100]]


def test_b029_wide_ids_come_out_as_they_went_in(tmp_path: Path, write_dataset: Callable[..., str]) -> None:
    store, ids = LocalStore(tmp_path), [1, 65_535, 65_536, 92_543]
    dataset = write_dataset(store, [ids], vocab_size=92_544)
    plan = PlanFile.open(store, build_plan(store, PlanSpec(datasets=[dataset], pack_length=4)).id)
    assert [data["input_ids"].tolist() for data, _ in loader(PackedDataset(plan, store), workers=1)] == [[ids]]


def ids(batch: Any) -> list[int]:
    data, _ = batch
    return [int(row[0]) for row in data["input_ids"] if row.any()]


@pytest.mark.parametrize("workers", [0, 1, 3, 4])
def test_b072_no_worker_repeats_what_another_gives(build: Build, workers: int) -> None:
    plan = build([[100 + i] * 8 for i in range(10)], ranks=2, strategy="none")
    for world in (1, 2):
        ranks = [PackedDataset(plan, plan.store, rank, world) for rank in range(world)]
        seen = [one for rank in ranks for batch in loader(rank, workers=workers) for one in ids(batch)]
        assert sorted(seen) == [*range(100, 110)]


def test_b073_and_b074_the_order_is_the_plans_in_every_worker_and_another_in_every_epoch(build: Build) -> None:
    plan = build([[100 + i] * 8 for i in range(40)], seed=5, epochs=2, strategy="none", overlong="split")
    torch.manual_seed(1)
    whole = [*chain(*map(ids, loader(PackedDataset(plan, plan.store), workers=4)))]
    torch.manual_seed(2)
    stayed = loader(PackedDataset(plan, plan.store), workers=4)
    assert [*chain(*map(ids, stayed))] == [*chain(*map(ids, stayed))] == whole  # the second time by workers that stayed
    first, second = whole[:40], whole[40:]
    assert sorted(first) == sorted(second) == [*range(100, 140)]
    assert first != second


@pytest.mark.parametrize("stop", [4, 10, 14])
def test_b075_epochs_after_a_resumed_one_are_whole(build: Build, stop: int) -> None:
    plan = build([[100 + i] * 8 for i in range(10)], seed=5, epochs=3, strategy="none")
    resumed = loader(PackedDataset(plan, plan.store), workers=2)
    resumed.load_state_dict({"plan": plan.id, "step": stop})
    seen = [*chain(*map(ids, resumed))]
    assert len(seen) == 30 - stop
    assert sorted(seen[-10:]) == [*range(100, 110)]
    assert [len(resumed), sum(1 for _ in resumed)] == [30, 30]


def test_b079_a_tokenizer_that_was_used_before_the_fork_is_no_matter(
    build: Build, tokenizer_dir: Path, tmp_path: Path
) -> None:
    plan = build([[100 + i] * 8 for i in range(10)])
    code = f"""
from transformers import AutoTokenizer
from packhouse.client import LocalStore, PackedDataset, loader
from packhouse.client.plan import PlanFile
tokenizer = AutoTokenizer.from_pretrained({str(tokenizer_dir)!r})
tokenizer(["one", "two"] * 500)
store = LocalStore({str(tmp_path)!r})
plan = PlanFile.open(store, {plan.id!r})
print(sum(1 for _ in loader(PackedDataset(plan, store), workers=2, method="fork")))
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=100)
    assert (run.returncode, run.stdout) == (0, f"{plan.steps}\n"), run.stderr
    assert "fork" not in run.stderr
