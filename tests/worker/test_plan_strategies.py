"""Plans of every strategy: each sample as often as asked, no pack too long, every token counted, equal packs a rank."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhouse.client.errors import InvalidRequest
from packhouse.client.pack import PackBuilder
from packhouse.client.plan import PlanFile, decode_steps
from packhouse.client.preset import export_preset, read_files
from packhouse.client.store import LocalStore
from packhouse.client.wire_plans import PlanSpec, Strategy
from packhouse.worker.executor import Executor
from packhouse.worker.packing.arrange import one_pass
from packhouse.worker.packing.mixture import Draw
from packhouse.worker.packing.preset import put_preset
from packhouse.worker.plans import build_plan

Make = Callable[..., Any]

STRATEGIES: list[Strategy] = ["none", "soft", "hard", "internevo", "internevo_unpacked", "best_fit", "balanced"]

SPECS = st.fixed_dictionaries(
    {
        "strategy": st.sampled_from(STRATEGIES),
        "order": st.sampled_from(["shuffled", "length_grouped"]),
        "pack_length": st.sampled_from([8, 20, 24]),
        "ranks": st.integers(1, 3),
        "micro_batches": st.integers(1, 2),
        "overlong": st.sampled_from(["truncate", "split", "drop"]),
        "tail": st.sampled_from(["pad", "drop"]),
        "max_segments": st.sampled_from([None, 1, 3]),
        "seed": st.integers(0, 3),
        "epochs": st.integers(1, 2),
        "weights": st.sampled_from([None, [1, 1], [1, 3]]),
    }
)


def tokens_of(plan: PlanFile) -> Counter[tuple[int, int]]:
    """Count how often each (sample, token) is packed."""
    packs = plan.packs
    columns = (column.tolist() for column in (packs.sample, packs.start, packs.length))
    return Counter((s, t) for s, a, n in zip(*columns, strict=True) for t in range(a, a + n))


@settings(max_examples=100)
@given(
    one=st.lists(st.integers(0, 30), min_size=2, max_size=25),
    two=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    fields=SPECS,
)
def test_every_token_is_packed_as_often_as_asked_or_counted(
    memory_store: Make, write_dataset: Make, one: list[int], two: list[int], fields: dict[str, Any]
) -> None:
    store = memory_store()
    datasets = [write_dataset(store, [[1] * n for n in lengths]) for lengths in (one, two)]
    if fields["strategy"] == "balanced":
        fields["order"] = "shuffled"
    seq_len = fields["pack_length"] // 2 if fields["strategy"] == "internevo_unpacked" else None
    spec = PlanSpec(datasets=datasets, **fields, seq_len=seq_len)
    try:
        report = build_plan(store, spec).report
    except InvalidRequest as error:
        if any(word in error.detail for word in ("do not fill a step", "no tokens", "none of the", "draws none")):
            return
        raise
    plan = PlanFile.open(store, build_plan(store, spec).id)
    packs = plan.packs
    assert plan.steps * spec.ranks * spec.micro_batches == len(packs)
    assert (packs.tokens <= spec.pack_length).all()
    assert np.diff(packs.offsets).max() <= (spec.max_segments or 99)
    counted = tokens_of(plan)
    asked = report.tokens + report.truncated_tokens + report.dropped_tokens
    assert sum(counted.values()) == report.tokens == int(packs.tokens.sum())
    assert report.padding_tokens == len(packs) * spec.pack_length - report.tokens
    lengths = [*one, *two]
    if spec.weights is None:
        assert asked == sum(lengths) * spec.epochs
    if spec.weights is None and not report.dropped_tokens:
        keep = spec.sample_limit if spec.overlong == "truncate" else 99
        once = Counter((i, t) for i, n in enumerate(lengths) for t in range(min(n, keep)))
        assert counted == Counter(dict.fromkeys(once, spec.epochs))
    assert sum(share.tokens for share in report.datasets) == report.tokens


@pytest.mark.parametrize("strategy", ["best_fit", "balanced", "hard", "soft"])
def test_weighted_datasets_are_drawn_as_asked_and_spread_evenly(
    memory_store: Make, write_dataset: Make, strategy: str
) -> None:
    store, generator = memory_store(), np.random.default_rng(1)
    many, few = (generator.integers(1, 60, count).tolist() for count in (900, 200))
    datasets = [write_dataset(store, [[1] * n for n in part], rows_per_shard=100) for part in (many, few)]
    fields: dict[str, Any] = {"strategy": strategy, "ranks": 2, "micro_batches": 2, "pack_length": 128}
    spec = PlanSpec(datasets=datasets, weights=[1, 2], **fields)
    plan = PlanFile.open(store, build_plan(store, spec).id)
    assert plan.report.datasets[1].share == pytest.approx(2 / 3, abs=0.01)
    drawn = np.bincount(plan.packs.sample[plan.packs.start == 0], minlength=1100)
    assert set(drawn[900:]) <= {(draws := int(drawn[900:].min())), draws + 1}
    assert set(drawn[:900]) <= {0, 1}
    if strategy == "balanced":
        return
    first = [plan.packs.sample[a] >= 900 for a, b in pairwise(plan.packs.offsets.tolist()) if b > a]
    taken = np.concatenate([[0], np.cumsum(first)])
    ahead = taken - np.arange(len(taken)) * (taken[-1] / (len(taken) - 1))
    assert abs(ahead).max() < 1


@pytest.mark.parametrize(("tail", "steps"), [("pad", 3), ("drop", 2)])
def test_groups_of_balanced_mixtures_that_do_not_fill_a_step_follow_the_tail(
    memory_store: Make, write_dataset: Make, tail: Any, steps: int
) -> None:
    store = memory_store()
    datasets = [write_dataset(store, [[1] * 8] * count) for count in (6, 4)]  # 3 and 2 groups of 2 full packs
    fields: dict[str, Any] = {"strategy": "balanced", "ranks": 2, "micro_batches": 2, "dataset_epochs": [1, 1]}
    report = build_plan(store, PlanSpec(datasets=datasets, pack_length=8, tail=tail, **fields)).report
    assert (report.steps, report.tokens, report.dropped_tokens) == (
        steps,
        64 + 16 * (tail == "pad"),
        80 - report.tokens,
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_number_of_workers_and_any_build_give_the_same_bytes(
    tmp_path: Path, write_dataset: Make, executor: Executor, strategy: Strategy
) -> None:
    lengths = np.random.default_rng(3).integers(0, 40, 300).tolist()
    stores = [LocalStore(tmp_path / name) for name in ("here", "there")]
    specs = [
        PlanSpec(
            datasets=[write_dataset(store, [[1] * n for n in lengths], rows_per_shard=50)],
            strategy=strategy,
            pack_length=64,
            ranks=2,
            seed=seed,
        )
        for store, seed in ((stores[0], 0), (stores[1], 0), (stores[1], 1))
    ]
    here = build_plan(stores[0], specs[0])
    tasks = [executor.submit(build_plan, stores[1], spec) for spec in specs[1:]]
    there, other = (executor.result(task) for task in tasks)
    assert (here, here.id == other.id) == (there, False)
    for key in [*stores[0].list("plans"), *stores[0].list("packs")]:
        assert stores[0].open(key).equals(stores[1].open(key))


def test_a_pass_is_derived_without_the_earlier_ones(memory_store: Make, write_dataset: Make) -> None:
    store, lengths = memory_store(), [5, 9, 3, 7, 1, 8, 4, 6, 2, 10] * 3
    spec = PlanSpec(datasets=[write_dataset(store, [[1] * n for n in lengths])], pack_length=16, epochs=3)
    packs = PlanFile.open(store, build_plan(store, spec).id).packs
    (last,) = one_pass(np.array(lengths, np.int32), Draw(0, 30, 3), 2, spec, None)
    assert packs.sample[-len(last.sample) :].tolist() == last.sample.tolist()


def test_a_steps_tokens_and_labels_are_the_same_for_every_rank_of_any_world(
    memory_store: Make, write_dataset: Make
) -> None:
    store = memory_store()
    dataset = write_dataset(store, [[1] * n for n in (5, 3, 8, 20, 7, 1)])
    spec = PlanSpec(datasets=[dataset], pack_length=8, ranks=3)
    plan = PlanFile.open(store, build_plan(store, spec).id)
    for world in (1, 2, 3):
        parts = [decode_steps(plan.slice(0, plan.steps, rank, world)) for rank in range(world)]
        for part in parts:
            assert part.step_tokens.tolist() == plan.table.tokens[part.step].tolist()
            assert part.step_trained_tokens.tolist() == plan.table.trained_tokens[part.step].tolist()
    # Each of the six samples has one label less than tokens: its last token has none.
    assert plan.table.trained_tokens.sum() == plan.report.trained_tokens == 44 - 6
    assert plan.report.trained_exact
    assert plan.table.rank_cost.shape == (plan.steps, 3)
    assert plan.table.rank_cost.sum() == plan.packs.cost.sum()


def test_labels_that_the_meta_does_not_tell_are_null_and_bounded(memory_store: Make, write_dataset: Make) -> None:
    store = memory_store()
    masks = [[1, 0, 1, 1], [1] * 6, [1, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1]]
    dataset = write_dataset(store, [[1] * len(mask) for mask in masks], masks)
    spec = PlanSpec(datasets=[dataset], pack_length=4, strategy="none", seed=None)
    plan = PlanFile.open(store, build_plan(store, spec).id)
    # Only the last is trained in part and cut, into 4 and 2 tokens with 4 labels and 1 at most.
    assert sorted(plan.table.trained_tokens.tolist()) == [-1, -1, 0, 0, 1, 2, 4]
    assert (plan.report.trained_tokens, plan.report.trained_exact) == (2 + 4 + 1 + 0 + 4 + 1, False)
    assert (decode_steps(plan.slice(0, 7, 0, 1)).step_trained_tokens == plan.table.trained_tokens).all()


@settings(max_examples=40)
@given(
    masks=st.lists(st.lists(st.integers(0, 1), max_size=14), min_size=1, max_size=20).filter(any),
    strategy=st.sampled_from(STRATEGIES),
    overlong=st.sampled_from(["truncate", "split", "drop"]),
    ranks=st.integers(1, 2),
)
def test_a_steps_labels_are_those_that_its_packs_have(
    memory_store: Make, write_dataset: Make, masks: list[list[int]], strategy: Strategy, overlong: Any, ranks: int
) -> None:
    store = memory_store()
    dataset = write_dataset(store, [[1] * len(mask) for mask in masks], masks)
    spec = PlanSpec(datasets=[dataset], pack_length=12, strategy=strategy, overlong=overlong, ranks=ranks)
    if overlong == "drop" and all(len(mask) > 12 or not mask for mask in masks):
        return
    plan = PlanFile.open(store, build_plan(store, spec).id)
    packs = PackBuilder(plan.header, store).build(plan.packs, 0, len(plan.packs))
    labels = np.array([int((pack.labels != -100).sum()) for pack in packs]).reshape(plan.steps, -1).sum(axis=1)
    told = plan.table.trained_tokens
    assert (told[told >= 0] == labels[told >= 0]).all()
    assert plan.report.trained_tokens >= labels.sum()
    if plan.report.split_samples == 0 and plan.report.truncated_samples == 0:
        assert (plan.report.trained_exact, plan.report.trained_tokens) == (True, labels.sum())


def test_a_plan_goes_out_as_a_preset_and_comes_back(tmp_path: Path, memory_store: Make, write_dataset: Make) -> None:
    store = memory_store()
    datasets = [write_dataset(store, [[1] * n for n in part]) for part in ([5, 9, 3, 7], [2, 8])]
    spec = PlanSpec(datasets=datasets, pack_length=8, ranks=2)
    plan = PlanFile.open(store, build_plan(store, spec).id)
    packs = plan.packs
    export_preset(plan, tmp_path, ["a.jsonl", "b.jsonl"])
    rows = np.load(tmp_path / "samples.npy")
    assert rows.dtype == np.int64
    assert (rows[:, 2:4] == -1).all()
    assert set(map(tuple, rows[:, :2].tolist())) == {(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)}
    digest = put_preset(store, read_files(tmp_path))
    again = build_plan(store, spec.model_copy(update={"strategy": "preset", "preset": digest}))
    brought = PlanFile.open(store, again.id).packs
    assert [column.tolist() for column in brought.arrays()] == [column.tolist() for column in packs.arrays()]
    assert (again.report.samples, again.report.split_samples) == (6, 1)
    with pytest.raises(InvalidRequest, match="the preset's longest pack has 8 tokens, for pack_length 7"):
        build_plan(store, spec.model_copy(update={"strategy": "preset", "preset": digest, "pack_length": 7}))
