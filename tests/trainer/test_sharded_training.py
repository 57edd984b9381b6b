"""Training over ranks: optimizer state dealt out, bad steps named, bfloat16, and what earlier trainers got wrong."""

import math
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.trainer.pool import Pool
from tests.trainer.recorder import Recorder
from tests.trainer.steps import Step, make_step, random_samples

import packhouse.trainer
from packhouse.trainer.flops import step_flops
from packhouse.trainer.log import StepLog, quiet
from packhouse.trainer.model import InternLM2, ModelConfig
from packhouse.trainer.optim import TrainConfig, make_optimizer
from packhouse.trainer.parallel import ModeName, build, make_groups, parallelize, plain
from packhouse.trainer.parallel.collectives import own_part
from packhouse.trainer.parallel.shard import whole_parameter
from packhouse.trainer.parallel.vocab_loss import vocab_parallel_cross_entropy
from packhouse.trainer.step import count_step, micro_batches, micro_loss
from packhouse.trainer.train import train
from packhouse.trainer.zero import SharedAdamW, deal_out

SHAPE = ModelConfig(32, 2, num_heads=8, num_kv_heads=4, ffn_size=48, vocab_size=64)
MODES: list[tuple[ModeName, int, int | None]] = [("mtp", 2, None), ("msp", 2, None), ("fsp", 2, None), ("isp", 2, 4)]


def steps(count: int, rank: int, ranks: int) -> list[Step]:
    """This data rank's pack of every step."""
    samples = [[random_samples([9, 7], 64, step * ranks + row) for row in range(ranks)] for step in range(count)]
    return [make_step([packs[rank]], 16) for packs in samples]


def train_some(name: ModeName, tp: int, wp: int | None, **settings: Any) -> tuple[list[StepLog], dict[str, Any], int]:
    """Logs and weights after four steps, and how many parameters this rank has optimizer state of."""
    groups = make_groups(tp, wp)
    model = build(SHAPE, groups, name, seed=6)
    if not settings.get("bf16"):
        model.model.double()
    config = TrainConfig(4, peak_lr=1e-2, **settings)
    optimizer = make_optimizer(model, config)
    logs = train(model, steps(4, groups.data.rank, groups.data.size), config, optimizer=optimizer, log=quiet)
    weights = {n: whole_parameter(x.detach(), model.placements[n]) for n, x in model.model.named_parameters()}
    return logs, weights, len(optimizer.state)


@pytest.mark.parametrize(("name", "tp", "wp"), [("mtp", 2, None), ("fsp", 1, None), ("isp", 2, 2), ("isp", 4, 1)])
def test_dealing_out_the_optimizer_state_changes_no_number(pool: Pool, name: ModeName, tp: int, wp: int | None) -> None:
    whole = pool.run(4, case_with_state, name, tp, wp, False)
    dealt = pool.run(4, case_with_state, name, tp, wp, True)
    for (losses, weights, _), (expected, expected_weights, _) in zip(dealt, whole, strict=True):
        assert losses == expected
        torch.testing.assert_close(weights, expected_weights, rtol=0, atol=0)
    share = 4 // (wp or tp)
    assert sum(states for *_, states in dealt) * share == sum(states for *_, states in whole)


def case_with_state(name: ModeName, tp: int, wp: int | None, shard: bool) -> tuple[list[float], dict[str, Any], int]:
    logs, weights, states = train_some(name, tp, wp, shard_optimizer=shard)
    return [entry.loss for entry in logs], weights, states


def test_fsp_gives_the_numbers_of_msp_to_the_bit(pool: Pool) -> None:
    (msp, weights, _), (fsp, other_weights, _) = (
        pool.run(4, case_with_state, name, 2, None, False)[0] for name in ("msp", "fsp")
    )
    assert fsp == msp
    torch.testing.assert_close(other_weights, weights, rtol=0, atol=0)


def test_the_largest_parameters_are_dealt_out_first() -> None:
    owners = deal_out({"a": 5, "b": 9, "c": 4, "d": 1, "e": 9}, 2)
    assert owners == {"b": 0, "e": 1, "a": 0, "c": 1, "d": 1}
    assert issubclass(SharedAdamW, torch.optim.AdamW)


def poisoned(name: ModeName, tp: int, wp: int | None) -> tuple[list[str], list[bool]]:
    """What is said of each step when one pack of one data rank overflows, and whether the weights moved."""
    groups = make_groups(tp, wp)
    model = build(SHAPE, groups, name, seed=6)
    with torch.no_grad():
        model.model.model.tok_embeddings.weight[7] = math.inf
    batches = steps(3, groups.data.rank, groups.data.size)
    for step, (data, _) in enumerate(batches):
        data["input_ids"][data["input_ids"] == 7] = 8
        data["input_ids"][0, 0] = 7 if step == 1 and groups.data.rank == 1 else 9
    weights: list[torch.Tensor] = []
    logs = train(model, batches, TrainConfig(3), log=lambda _: weights.append(model.model.output.weight.clone()))
    return [entry.skipped for entry in logs], [not torch.equal(*pair) for pair in pairwise(weights)]


@pytest.mark.parametrize(("name", "tp", "wp"), MODES)
def test_a_gradient_that_is_not_finite_is_skipped_on_all_ranks_and_named(
    pool: Pool, name: ModeName, tp: int, wp: int | None
) -> None:
    for skipped, moved in pool.run(4, poisoned, name, tp, wp):
        assert skipped == ["", "gradient norm is nan, loss is not finite in packs [0] of data rank 1", ""]
        assert moved == [False, True]


def overflowing(name: ModeName, tp: int, wp: int | None) -> list[str]:
    """What is said of each step when the loss of one pack of one data rank is finite, and its gradient is not."""
    groups = make_groups(tp, wp)
    model = build(SHAPE, groups, name, seed=6)
    first, second = (steps(2, groups.data.rank, groups.data.size) for _ in range(2))
    batches = [
        ({key: torch.cat([a[key], b[key]]) if key != "cu_seqlens" else a[key] + b[key] for key in a}, torch.cat([x, y]))
        for (a, x), (b, y) in zip(first, second, strict=True)
    ]
    runs: list[int] = []

    def overflow(module: Any, args: Any, hidden: torch.Tensor) -> None:
        runs.append(len(runs) % 2)  # the second of two packs, when it is run again as well
        if groups.data.rank == 1 and runs[-1] == 1 and len(runs) < 5 and hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call]

    model.model.model.norm.register_forward_hook(overflow)
    return [entry.skipped for entry in train(model, batches, TrainConfig(2), log=quiet)]


@pytest.mark.parametrize(("name", "tp", "wp"), [*MODES[:3], ("isp", 2, 2)])
def test_a_pack_whose_gradient_alone_overflows_is_named_too(
    pool: Pool, name: ModeName, tp: int, wp: int | None
) -> None:
    said = "gradient norm is nan, gradient is not finite in packs [1] of data rank 1"
    assert pool.run(4, overflowing, name, tp, wp) == [[said, ""]] * 4


def narrow(name: ModeName, tp: int, wp: int | None) -> tuple[list[float], set[torch.dtype], set[torch.dtype]]:
    logs, weights, _ = train_some(name, tp, wp, bf16=True)
    return [entry.loss for entry in logs], {x.dtype for x in weights.values()}, logits_dtypes(name, tp, wp)


def logits_dtypes(name: ModeName, tp: int, wp: int | None) -> set[torch.dtype]:
    model, seen = build(SHAPE, make_groups(tp, wp), name), set()
    for place, module in model.model.named_modules():
        if place.endswith(("output", "wqkv", "w2")):
            module.register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    ((pack, targets),) = micro_batches(*steps(1, 0, 1)[0], torch.device("cpu"))
    micro_loss(model, pack, targets, 14, bf16=True)
    return seen


@pytest.mark.parametrize(("name", "tp", "wp"), MODES)
def test_bfloat16_computes_narrow_on_wide_weights_near_the_wide_losses(
    pool: Pool, name: ModeName, tp: int, wp: int | None
) -> None:
    wide = [entry.loss for entry in pool.run(4, train_some, name, tp, wp)[0][0]]
    for losses, weights, computed in pool.run(4, narrow, name, tp, wp):
        assert losses == pytest.approx(wide, abs=0.02)
        assert weights == {torch.float32}
        assert computed == {torch.bfloat16}


def counted(name: ModeName, tp: int, wp: int | None) -> tuple[float, float]:
    """Operations of a step as a rank knows them, and of its own packs; each data rank's segments differ."""
    model = build(SHAPE, make_groups(tp, wp), name)
    rank = model.groups.data.rank
    data, labels = make_step([random_samples([16 - 5 * rank, 5 * rank or 16], 64)], 32)
    counts = count_step(labels, model, "token", data["cu_seqlens"])
    return counts.flops, step_flops(SHAPE, data["cu_seqlens"])


def test_operations_are_those_of_all_data_ranks_segments(pool: Pool) -> None:
    found = pool.run(4, counted, "isp", 2, 4)
    assert found[0][1] != found[2][1]
    assert {total for total, _ in found} == {found[0][1] + found[2][1]}


def vocab_loss() -> None:
    """Labels masked in part; rows without a label must have no gradient at all, in float64 and in bfloat16."""
    group = make_groups(4).tensor
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 2e-3)):
        logits = (8 * torch.randn(2, 700, 12, generator=torch.Generator().manual_seed(1))).to(dtype)
        labels = torch.arange(1400).view(2, 700) % 12
        labels[0, 5:] = -100
        part = own_part(logits, group, 2).requires_grad_()
        loss = vocab_parallel_cross_entropy(part, labels, 705, group)
        torch.autograd.backward(loss)
        whole = logits.detach().requires_grad_()
        wide = whole.to(torch.promote_types(dtype, torch.float32)).flatten(0, 1)
        expected = F.cross_entropy(wide, labels.flatten(), reduction="sum") / 705
        torch.autograd.backward(expected)
        torch.testing.assert_close(loss, expected, rtol=1e-6 if dtype == torch.bfloat16 else 0, atol=tolerance)
        assert part.grad is not None
        assert whole.grad is not None
        torch.testing.assert_close(part.grad, own_part(whole.grad, group, 2), rtol=0, atol=tolerance)
        assert not part.grad[0, 5:].any()


def test_a_cut_vocabulary_gives_the_loss_and_gradients_of_the_whole(pool: Pool) -> None:
    pool.run(4, vocab_loss)


def frozen(name: ModeName, tp: int, wp: int | None) -> tuple[bool, Counter[str]]:
    """Whether the head alone learns, and what its backward pass costs."""
    model = InternLM2(SHAPE)
    for parameter in model.model.parameters():
        parameter.requires_grad_(False)
    sharded = parallelize(model, make_groups(tp, wp), name)
    ((pack, targets),) = micro_batches(*steps(1, 0, 1)[0], torch.device("cpu"))
    loss = micro_loss(sharded, pack, targets, 14)
    with Recorder() as recorder:
        torch.autograd.backward(loss)
        cost = recorder.count()
    with_gradient = [n for n, x in model.named_parameters() if x.grad is not None]
    return with_gradient == ["output.weight"], cost


@pytest.mark.parametrize(("name", "tp", "wp"), MODES)
def test_a_frozen_body_needs_no_gradient_of_the_head_s_input(
    pool: Pool, name: ModeName, tp: int, wp: int | None
) -> None:
    needed = {"isp": {"reduce-scatter": 1}, "fsp": {"all-gather": 1}}
    assert pool.run(4, frozen, name, tp, wp) == [(True, needed.get(name, {}))] * 4


def cut_rows() -> list[int]:
    model = InternLM2(ModelConfig(8, 1, num_heads=4, num_kv_heads=2, ffn_size=8, vocab_size=8))
    wqkv = model.model.layers[0].attention.wqkv  # type: ignore[union-attr]
    with torch.no_grad():
        wqkv.weight.copy_(torch.arange(16)[:, None].expand(16, 8))  # type: ignore[union-attr, operator]
    parallelize(model, make_groups(2), "mtp")
    return [int(row) for row in wqkv.weight[:, 0]]  # type: ignore[union-attr, index]


def test_the_fused_weight_is_cut_between_key_value_heads(pool: Pool) -> None:
    assert pool.run(2, cut_rows) == [list(range(8)), list(range(8, 16))]


def odd_segments() -> tuple[float, float]:
    """Segments of 5, 3 and 1 tokens in a pack of 16, cut in the middle of one."""
    data, labels = make_step([random_samples([5, 3, 1], 64)], 16)
    ((pack, targets),) = micro_batches(data, labels, torch.device("cpu"))
    model, whole = build(SHAPE, make_groups(2), "isp", seed=6), plain(InternLM2(SHAPE, seed=6))
    return float(micro_loss(model, pack, targets, 6)), float(micro_loss(whole, pack, targets, 6))


def test_odd_segments_leak_nothing_over_a_cut(pool: Pool) -> None:
    parts = pool.run(2, odd_segments)
    assert sum(part for part, _ in parts) == pytest.approx(parts[0][1], abs=1e-6)


def test_nothing_waits_for_the_device_in_the_hot_path() -> None:
    sources = set(Path(next(iter(packhouse.trainer.__path__))).rglob("*.py"))
    waiting = {path.stem for path in sources if re.search(r"\bcuda\.synchronize\(", path.read_text())}
    assert waiting <= {"gpu_check"}


GOLDEN = [4.1793, 4.183, 4.1742, 4.1962, 4.1758, 4.1556]


def test_the_first_losses_are_the_ones_they_always_were() -> None:
    """Seeds, initial weights, data order, loss and optimizer: a change of any shows here."""
    logs = train(plain(InternLM2(SHAPE, seed=6)), steps(6, 0, 1), TrainConfig(6, peak_lr=1e-2), log=quiet)
    assert [entry.loss for entry in logs] == pytest.approx(GOLDEN, abs=2e-4)


@pytest.mark.parametrize("micro_num", [1, 2])
def test_a_step_of_one_micro_batch_counts_like_any_other(micro_num: int) -> None:
    clock = iter(range(0, 100, 2)).__next__
    step = make_step([random_samples([9, 7], 64, seed) for seed in range(micro_num)], 16)
    (entry,) = train(InternLM2(SHAPE), [step], TrainConfig(1), log=quiet, clock=clock)
    assert (entry.tokens_per_s, entry.trained_tokens_per_s) == (8 * micro_num, 7 * micro_num)
