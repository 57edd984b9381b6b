"""Cases that went wrong elsewhere, as plans: what is packed, what is counted, and what is refused with a remedy."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from packhouse.client.errors import InvalidRequest, NotFound
from packhouse.client.pack import PackBuilder
from packhouse.client.plan import PlanFile, decode_steps
from packhouse.client.wire_plans import PlanReport, PlanSpec
from packhouse.worker.plans import build_plan

Make = Callable[..., Any]

ALL = ["none", "soft", "hard", "internevo", "internevo_unpacked", "best_fit", "balanced"]

SENTENCES = [
    [2323, 442, 252, 341],
    [233, 3442, 322, 31, 2514, 49731, 51],
    [4326, 427, 465, 22, 314, 9725, 346, 1343],
    [24, 2562, 5, 25, 356, 3145, 246, 25, 1451, 67, 73, 541, 265],
    [4524, 2465, 562, 67, 26, 265, 21, 256, 145, 1345],
    [34, 14],
]
ROWS = [
    [2323, 442, 252, 341, 233, 3442, 322, 31, 2514, 49731, 51, 0, 0, 0, 0, 0],
    [4326, 427, 465, 22, 314, 9725, 346, 1343, 24, 2562, 5, 25, 356, 3145, 246, 25],
    [4524, 2465, 562, 67, 26, 265, 21, 256, 34, 14, 0, 0, 0, 0, 0, 0],
]
LABELS = [
    [442, 252, 341, -100, 3442, 322, 31, 2514, 49731, 51, -100, -100, -100, -100, -100, -100],
    [427, 465, 22, 314, 9725, 346, 1343, -100, 2562, 5, 25, 356, 3145, 246, 25, -100],
    [2465, 562, 67, 26, 265, 21, 256, -100, 14, -100, -100, -100, -100, -100, -100, -100],
]


@pytest.fixture
def build(memory_store: Make, write_dataset: Make) -> Make:
    """Return a function (lengths, **spec) -> the plan of one dataset with samples of these lengths."""

    def built(lengths: list[int], **fields: Any) -> PlanFile:
        store = memory_store()
        dataset = write_dataset(store, [[100 + i] * n for i, n in enumerate(lengths)])
        spec = PlanSpec(datasets=[dataset], **fields)
        return PlanFile.open(store, build_plan(store, spec).id)

    return built


def test_six_sentences_give_three_unpacked_packs_with_the_labels_shown(memory_store: Make, write_dataset: Make) -> None:
    store = memory_store()
    dataset = write_dataset(store, SENTENCES, vocab_size=92544)
    fields: dict[str, Any] = {
        "strategy": "internevo_unpacked",
        "pack_length": 16,
        "seq_len": 8,
        "overlong": "truncate",
        "seed": None,
    }
    plan = PlanFile.open(store, build_plan(store, PlanSpec(datasets=[dataset], **fields)).id)
    packs = PackBuilder(plan.header, store).build(decode_steps(plan.slice(0, 3, 0, 1)).packs, 0, 3)
    assert [pack.input_ids.tolist() for pack in packs] == ROWS
    assert [pack.labels.tolist() for pack in packs] == LABELS
    counts = [int((np.array(labels) != -100).sum()) for labels in LABELS]
    assert plan.table.trained_tokens.tolist() == counts
    assert (plan.report.truncated_samples, plan.report.truncated_tokens) == (2, 7)


@pytest.mark.parametrize("strategy", ALL)
def test_one_overlong_rule_in_every_strategy(build: Make, strategy: str) -> None:
    """B048: dropped in one mode and cut in another, and not told."""
    truncated = build([4, 12, 4], pack_length=8, strategy=strategy, overlong="truncate").report
    assert (truncated.tokens, truncated.truncated_samples, truncated.truncated_tokens) == (16, 1, 4)
    dropped = build([4, 12, 4], pack_length=8, strategy=strategy, overlong="drop").report
    assert (dropped.tokens, dropped.dropped_samples, dropped.dropped_tokens) == (8, 1, 12)
    whole = build([4, 12, 4], pack_length=8, strategy=strategy, overlong="split").report
    assert (whole.tokens, whole.dropped_tokens, whole.truncated_tokens) == (20, 0, 0)
    with pytest.raises(InvalidRequest, match=r"is shorter than sample 1 \(12 tokens\): raise it, or set overlong"):
        build([4, 12, 4], pack_length=8, strategy=strategy, overlong="error")


@pytest.mark.parametrize(
    ("overlong", "tokens", "packs", "lost"), [("split", 10, 4, 0), ("truncate", 9, 3, 1), ("drop", 6, 2, 4)]
)
def test_overflow_is_kept_or_counted(build: Make, overlong: str, tokens: int, packs: int, lost: int) -> None:
    """B043: what is over a pack is thrown away, or packed as a headless tail, without a word."""
    report: PlanReport = build([4, 2, 3, 1], pack_length=3, overlong=overlong).report
    assert (report.tokens, report.packs) == (tokens, packs)
    assert report.truncated_tokens + report.dropped_tokens == lost


@pytest.mark.parametrize(
    ("lengths", "fields", "packs"),
    [
        pytest.param([5, 4, 4, 3], {"pack_length": 9}, 2, id="B044, no power of two"),
        pytest.param([5, 4, 4, 3], {"pack_length": 8}, 2, id="B044, a power of two"),
        pytest.param([5, 4, 4, 3], {"pack_length": 17}, 1, id="B044, all in one"),
        pytest.param([5] * 5, {"pack_length": 10}, 3, id="B045, samples of equal length"),
        pytest.param([3, 8, 5], {"pack_length": 8, "strategy": "none"}, 3, id="B047, shorter than the longest"),
        ([13, 11], {"pack_length": 10, "overlong": "truncate"}, 2),
        ([5, 0, 3], {"pack_length": 4}, 2),
        ([3, 3], {"pack_length": 4, "strategy": "soft"}, 2),
    ],
)
def test_no_sample_is_lost(build: Make, lengths: list[int], fields: dict[str, Any], packs: int) -> None:
    plan = build(lengths, **fields)
    assert plan.report.packs == packs
    whole = plan.packs.sample[plan.packs.start == 0]
    assert sorted(whole.tolist()) == [i for i, n in enumerate(lengths) if n]


def test_sentences_that_are_not_packed_each_get_a_row(memory_store: Make, write_dataset: Make) -> None:
    """B063: a sampler of tokens over data of sentences; there are as many items as sentences, and each is whole."""
    store = memory_store()
    dataset = write_dataset(store, [[11, 12, 13], [21, 22]])
    fields: dict[str, Any] = {"strategy": "internevo_unpacked", "pack_length": 8, "seed": None}
    plan = PlanFile.open(store, build_plan(store, PlanSpec(datasets=[dataset], **fields)).id)
    packs = PackBuilder(plan.header, store, pad_id=2).build(plan.packs, 0, len(plan.packs))
    assert [pack.input_ids.tolist() for pack in packs] == [[11, 12, 13, 2, 2, 2, 2, 2], [21, 22, 2, 2, 2, 2, 2, 2]]


@pytest.mark.parametrize("strategy", ["none", "balanced", "best_fit"])
def test_every_rank_has_as_many_packs_and_every_sample_is_used(build: Make, strategy: str) -> None:
    plan = build([9] * 5, pack_length=10, strategy=strategy, ranks=2, micro_batches=2)
    assert (plan.steps, plan.report.packs, plan.report.empty_packs) == (2, 5, 3)
    assert sorted(plan.packs.sample.tolist()) == list(range(5))


def test_the_stated_number_of_batches_is_the_number_given(build: Make) -> None:
    """B106: a length that rounds down loses the tail, or a wrong axis leaves the ranks as uneven as before."""
    plan = build(list(range(1, 21)), pack_length=20, strategy="none", micro_batches=3)
    assert plan.steps == plan.report.steps == 7
    shuffled = build(list(range(1, 21)), pack_length=20, strategy="none", ranks=4, tail="drop").report
    grouped = build(list(range(1, 21)), pack_length=20, strategy="none", ranks=4, order="length_grouped").report
    assert grouped.imbalance_mean < shuffled.imbalance_mean


ELSEWHERE = """
import random, sys
import numpy as np
random.seed(int(sys.argv[1])), np.random.seed(int(sys.argv[1])), random.random(), np.random.rand(int(sys.argv[1]))
from packhouse.worker.packing.length_grouped import length_grouped
from packhouse.worker.packing.shuffle import shuffled
cost = np.arange(1, 21) ** 2
order = length_grouped(cost, shuffled(20, 7), 4, 2, lambda count, stretch: shuffled(count, 7, stretch))
print(order.tolist())
"""


def test_processes_that_used_their_randomness_differently_agree() -> None:
    """B105: an order drawn on each rank from a random state of its own is no order of the data set."""
    commands = ([sys.executable, "-c", ELSEWHERE, state] for state in ("1", "5"))
    orders = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for command in commands]
    assert orders[0] == orders[1]
    assert sorted(map(int, orders[0].strip("[]\n").split(","))) == list(range(20))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": [1, 2]}, "there are 2 weights for 1 datasets"),
        ({"weights": [0.0]}, "has 0 in weights"),
        ({"weights": [1], "dataset_epochs": [1]}, "each say how often"),
        ({"strategy": "balanced", "order": "length_grouped"}, "an order of their own"),
        ({"strategy": "balanced", "seed": None}, "without a seed"),
        ({"order": "length_grouped", "seed": None}, "without a seed"),
        ({"strategy": "preset"}, "do not go together"),
        ({"preset": "a" * 32}, "do not go together"),
        ({"strategy": "internevo_unpacked", "seq_len": 3}, "not a multiple of seq_len 3"),
        ({"ranks": 9, "tail": "drop"}, "do not fill a step of 9 ranks"),
        ({"strategy": "balanced", "ranks": 9, "tail": "drop"}, "do not fill a step of 9 ranks"),
    ],
)
def test_impossible_requests_say_what_to_do(build: Make, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        build([3, 4, 5], **{"pack_length": 8, **fields})
    assert caught.value.remedy


def test_a_preset_that_is_not_stored_is_not_found(build: Make) -> None:
    with pytest.raises(NotFound, match="there is no preset"):
        build([3], pack_length=8, strategy="preset", preset="0" * 32)


def test_a_cost_model_follows_from_a_models_shape() -> None:
    from packhouse.client.wire_plans import CostModel

    model = CostModel.of_model(hidden=4096, ffn=14336, heads=32, kv_heads=8)
    assert (model.token, model.square) == (2 * 4096 + 2 * 1024 + 3 * 14336, 1)
