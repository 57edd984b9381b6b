"""Plans from datasets in a store: report, policies, epochs, identity, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhouse.client.digest import canonical_json
from packhouse.client.errors import InvalidRequest, NotFound
from packhouse.client.format import data_path, manifest_path, read_manifest
from packhouse.client.plan import PlanFile, plan_id, plan_path
from packhouse.client.wire_plans import CostModel, Plan, PlanReport, PlanSpec
from packhouse.worker.plans import build_plan

Write = Callable[..., str]
Memory = Callable[[], Any]


def samples(lengths: list[int]) -> list[list[int]]:
    return [[100 + i] * n for i, n in enumerate(lengths)]


@pytest.fixture
def report(memory_store: Memory, write_dataset: Write) -> Callable[..., PlanReport]:
    def build(lengths: list[int], most: int = 1 << 20, **spec: Any) -> PlanReport:
        store = memory_store()
        dataset = write_dataset(store, samples(lengths))
        return build_plan(store, PlanSpec(datasets=[dataset], **spec), most=most).report

    return build


def test_overlong_samples_are_truncated_dropped_or_split_and_counted(report: Callable[..., PlanReport]) -> None:
    cut = report([4, 2, 3, 1], pack_length=3, overlong="truncate")
    assert (cut.tokens, cut.truncated_samples, cut.truncated_tokens, cut.packs) == (9, 1, 1, 3)
    dropped = report([4, 2, 3, 1], pack_length=3, overlong="drop")
    assert (dropped.tokens, dropped.dropped_samples, dropped.dropped_tokens, dropped.packs) == (6, 1, 4, 2)
    split = report([4, 2, 3, 1], pack_length=3, overlong="split")
    assert (split.tokens, split.split_samples, split.packs, split.segments) == (10, 1, 4, 5)


@pytest.mark.parametrize("strategy", ["best_fit", "internevo"])
def test_both_strategies_follow_one_overlong_rule(report: Callable[..., PlanReport], strategy: str) -> None:
    cut = report([4, 12, 4], pack_length=8, overlong="truncate", strategy=strategy)
    assert (cut.tokens, cut.truncated_tokens) == (16, 4)
    with pytest.raises(InvalidRequest, match=r"pack_length 8 is shorter than sample 1 \(12 tokens\): raise it, or set"):
        report([4, 12, 4], pack_length=8, overlong="error", strategy=strategy)


def test_the_report_counts_padding_balance_and_shards(report: Callable[..., PlanReport]) -> None:
    plan = report(
        [4, 4, 2, 0, 6],
        pack_length=8,
        ranks=2,
        micro_batches=1,
        strategy="internevo",
        seed=None,
        cost=CostModel(token=1, square=1),
    )
    assert (plan.samples, plan.zero_length, plan.tokens, plan.packs, plan.empty_packs, plan.steps) == (
        5,
        1,
        16,
        2,
        0,
        1,
    )
    assert (plan.segments, plan.segments_per_pack_max, plan.segments_per_pack_mean) == (4, 2, 2.0)
    assert (plan.padding, plan.padding_tokens) == (0.0, 0)
    # rank 0: 4 + 16 + 4 + 16 = 40; rank 1: 2 + 4 + 6 + 36 = 48
    assert plan.imbalance_mean == plan.imbalance_p99 == 48 / 44
    assert plan.shards_per_step_mean == 2


def test_a_last_step_is_padded_or_dropped_and_counted(report: Callable[..., PlanReport]) -> None:
    padded = report([5, 5, 5], pack_length=5, ranks=2, tail="pad")
    assert (padded.steps, padded.packs, padded.empty_packs, padded.padding) == (2, 3, 1, 0.25)
    dropped = report([5, 5, 5], pack_length=5, ranks=2, tail="drop")
    assert (dropped.steps, dropped.packs, dropped.tokens, dropped.dropped_tokens) == (1, 2, 10, 5)


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=25).filter(any),
    spec=st.fixed_dictionaries(
        {
            "strategy": st.sampled_from(["best_fit", "internevo"]),
            "pack_length": st.integers(4, 24),
            "ranks": st.integers(1, 3),
            "micro_batches": st.integers(1, 2),
            "overlong": st.sampled_from(["truncate", "split", "drop"]),
            "tail": st.sampled_from(["pad", "drop"]),
            "seed": st.sampled_from([None, 0, 7]),
            "epochs": st.integers(1, 3),
        }
    ),
)
def test_two_builds_are_byte_identical_and_lose_no_token_uncounted(
    memory_store: Memory, write_dataset: Write, lengths: list[int], spec: dict[str, Any]
) -> None:
    stores = [memory_store(), memory_store()]
    plans: list[Plan] = []
    for store in stores:
        request = PlanSpec(datasets=[write_dataset(store, samples(lengths))], **spec)
        try:
            plans.append(build_plan(store, request))
        except InvalidRequest:
            assert spec["tail"] == "drop" or spec["overlong"] == "drop"
            return
    first, second = (store.files[plan_path(plans[0].id)] for store in stores)
    assert first == second
    report = plans[0].report
    assert report.tokens + report.truncated_tokens + report.dropped_tokens == sum(lengths) * spec["epochs"]
    slots = report.steps * spec["ranks"] * spec["micro_batches"] * spec["pack_length"]
    assert report.tokens + report.padding_tokens == slots


def test_each_epoch_has_every_sample_in_an_order_of_its_own(memory_store: Memory, write_dataset: Write) -> None:
    store = memory_store()
    spec = PlanSpec(datasets=[write_dataset(store, samples([8] * 12))], pack_length=8, epochs=3)
    order = PlanFile.open(store, build_plan(store, spec).id).packs.sample.reshape(3, 12)
    assert (np.sort(order) == np.arange(12)).all()
    assert len({tuple(row) for row in order.tolist()}) == 3
    once = PlanFile.open(store, build_plan(store, spec.model_copy(update={"epochs": 1})).id)
    assert once.packs.sample.tolist() == order[0].tolist()


def test_best_fit_mixes_long_and_short_packs_over_the_steps(memory_store: Memory, write_dataset: Write) -> None:
    store = memory_store()
    spec = PlanSpec(datasets=[write_dataset(store, samples(list(range(1, 41))), rows_per_shard=10)], pack_length=40)
    plan = PlanFile.open(store, build_plan(store, spec).id)
    shortest = np.minimum.reduceat(plan.packs.length, plan.packs.offsets[:-1])
    assert shortest.tolist() != sorted(shortest, reverse=True)
    unseeded = PlanFile.open(store, build_plan(store, spec.model_copy(update={"seed": None})).id)
    shortest = np.minimum.reduceat(unseeded.packs.length, unseeded.packs.offsets[:-1])
    assert shortest.tolist() == sorted(shortest, reverse=True)


def test_a_stored_plan_is_not_built_again_until_its_shards_change(memory_store: Memory, write_dataset: Write) -> None:
    store = memory_store()
    dataset = write_dataset(store, samples([3, 4, 5]))
    spec = PlanSpec(datasets=[dataset], pack_length=8)
    assert not build_plan(store, spec, write=False).stored
    assert plan_path(plan_id(spec)) not in store.files
    built = build_plan(store, spec)
    del store.files[data_path(read_manifest(store, dataset).shards[0].key)]
    meta = {key: store.files.pop(key) for key in list(store.files) if key.endswith(".meta.arrow")}
    assert build_plan(store, spec) == built
    manifest = read_manifest(store, dataset)
    shards = tuple(replace(shard, records=shard.records + 1) for shard in manifest.shards)
    store.write(manifest_path(dataset), replace(manifest, shards=shards).dump())
    with pytest.raises(NotFound, match="meta"):
        build_plan(store, spec)
    store.files |= meta
    build_plan(store, spec)
    assert PlanFile.open(store, built.id).header.datasets[0].shards[0].records == 4


def test_a_damaged_plan_is_built_again(memory_store: Memory, write_dataset: Write) -> None:
    store = memory_store()
    spec = PlanSpec(datasets=[write_dataset(store, samples([3, 4, 5]))], pack_length=8)
    path = plan_path(build_plan(store, spec).id)
    whole = store.files[path]
    store.files[path] = whole[: len(whole) // 2]
    build_plan(store, spec)
    assert store.files[path] == whole


def test_datasets_are_numbered_in_the_order_given(memory_store: Memory, write_dataset: Write) -> None:
    store = memory_store()
    one, two = (write_dataset(store, samples(lengths)) for lengths in ([1, 2, 3, 4], [5, 6]))
    spec = PlanSpec(datasets=[two, one], pack_length=30, strategy="internevo", seed=None)
    packs = PlanFile.open(store, build_plan(store, spec).id).packs
    assert packs.length.tolist() == [5, 6, 1, 2, 3, 4]
    assert packs.sample.tolist() == list(range(6))


@pytest.mark.parametrize(
    ("lengths", "spec", "message"),
    [
        ([3], {"pack_length": 4, "seq_len": 2}, "seq_len 2 has no meaning for strategy best_fit"),
        ([3], {"pack_length": 4, "seq_len": 8, "strategy": "internevo"}, "seq_len 8 is longer than pack_length 4"),
        ([0, 0], {"pack_length": 4}, "none of the 2 samples has tokens"),
        ([], {"pack_length": 4}, "none of the 0 samples has tokens"),
        ([9], {"pack_length": 4, "overlong": "drop"}, "none of the 1 samples has tokens"),
        ([9] * 3, {"pack_length": 10, "ranks": 5, "tail": "drop"}, r"3 packs do not fill a step of 5 ranks x 1"),
        ([3], {"pack_length": 2**31 - 1, "strategy": "hard", "cost": {"square": 8}}, r"over 2\*\*63"),
        ([3], {"pack_length": 2**24 + 1}, "pack_length 16777217 is over the 16777216 of strategy best_fit"),
        ([3], {"pack_length": 4, "epochs": 3, "most": 2}, "draw samples 3 times, over 2"),
        ([3], {"pack_length": 4, "dataset_epochs": [3], "most": 2}, "draw samples 3 times, over 2"),
        ([3], {"pack_length": 4, "strategy": "preset", "preset": "a", "max_segments": 1}, "leave max_segments out"),
    ],
)
def test_impossible_requests_say_what_to_do(
    report: Callable[..., PlanReport], lengths: list[int], spec: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        report(lengths, **spec)
    assert caught.value.remedy


def test_unknown_datasets_and_mixed_tokenizers_are_refused(memory_store: Memory, write_dataset: Write) -> None:
    store = memory_store()
    with pytest.raises(NotFound, match="there is no dataset 'nowhere'"):
        build_plan(store, PlanSpec(datasets=["nowhere"], pack_length=4))
    ours, theirs = (write_dataset(store, samples([3]), tokenizer=digest) for digest in ("a" * 32, "b" * 32))
    with pytest.raises(InvalidRequest, match=r"tokenizer aaaa.* has bbbb"):
        build_plan(store, PlanSpec(datasets=[ours, theirs], pack_length=4))


def test_the_header_reads_back(memory_store: Memory, write_dataset: Write) -> None:
    store = memory_store()
    spec = PlanSpec(datasets=[write_dataset(store, samples([3, 4, 5]))], pack_length=8)
    header = PlanFile.open(store, build_plan(store, spec).id).header
    assert header.from_json(header.to_json()) == header
    assert canonical_json(header.to_json())
