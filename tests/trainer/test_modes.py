"""Every mode and size gives the loss, the logits, every gradient and the update of the plain model."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.trainer.pool import Pool
from tests.trainer.steps import Step, make_step, random_samples
from torch import Tensor

from packhouse.client.errors import PackhouseError
from packhouse.trainer.model import InternLM2, ModelConfig
from packhouse.trainer.parallel import Groups, ModeName, Options, ShardedModel, build, make_groups, plain
from packhouse.trainer.parallel.collectives import all_reduce, own_part
from packhouse.trainer.parallel.shard import own_shard, whole_parameter
from packhouse.trainer.step import (
    accumulate_gradients,
    count_step,
    gradient_norm,
    micro_batches,
    micro_loss,
    sum_gradients,
    with_rows,
)

PACK = 32
MICRO = 2


def config(kv_heads: int) -> ModelConfig:
    return ModelConfig(32, 2, num_heads=8, num_kv_heads=kv_heads, ffn_size=48, vocab_size=64)


def whole_step(ranks: int) -> Step:
    """Packs of all data ranks: ragged samples, masked labels in unequal numbers; the second rank trains nothing."""
    lengths = itertools.cycle([[9, 1, 14], [32], [3, 3, 11, 5, 7], [20], [17, 15]])
    packs = [random_samples(next(lengths), 64, seed) for seed in range(ranks * MICRO)]
    data, labels = make_step(packs, PACK, untrained=[1, 2, 3])
    for row in range(len(labels)):
        labels[row, : 3 * row] = -100
    return data, labels


def own_step(step: Step, rank: int) -> Step:
    data, labels = step
    rows = slice(rank * MICRO, (rank + 1) * MICRO)
    return {name: x[rows] for name, x in data.items()}, labels[rows]


def run(sharded: ShardedModel, step: Step, reduction: Any) -> tuple[Tensor, float]:
    """Loss and gradient norm; gradients are left in the parameters."""
    counts = count_step(step[1], sharded, reduction)
    losses = accumulate_gradients(sharded, *step, counts.divisors)
    sum_gradients(sharded)
    return all_reduce(losses.sum(), sharded.mode.sum_loss), gradient_norm(sharded)


def logits(sharded: ShardedModel, step: Step) -> Iterator[Tensor]:
    with torch.no_grad():
        for pack, targets in micro_batches(*step, torch.device("cpu")):
            own, _ = sharded.own_data(pack, targets)
            yield sharded.model(own["input_ids"], own["cu_seqlens"], own["indexes"], own["max_seqlen"])


def own_logits(whole: Tensor, sharded: ShardedModel) -> Tensor:
    """The part of a pack's logits that a rank has: of the sequence in isp, of the vocabulary in the others."""
    return own_part(whole, sharded.groups.tensor, 1 if sharded.mode.cut_data else 2)


VARIANTS: list[tuple[Options, str, torch.dtype]] = [
    (Options(), "token", torch.float64),
    (Options(parallel_output=False), "token", torch.float64),
    (Options(overlap=False), "micro_batch", torch.float64),
    (Options(recompute_layers=1), "micro_batch", torch.float64),
    (Options(recompute_layers=2), "token", torch.float32),
]


def compare_all(name: ModeName, tp: int, wp: int | None, kv_heads: int) -> None:
    groups = make_groups(tp, wp)
    # Many processes on few cores take their time; the smallest world covers every variant.
    for variant in VARIANTS[: {8: 2, 4: 4}.get(groups.world.size)]:
        try:
            compare(groups, name, kv_heads, *variant)
        except AssertionError as error:
            error.add_note(f"in variant {variant}")
            raise


def compare(
    groups: Groups, name: ModeName, kv_heads: int, options: Options, reduction: str, dtype: torch.dtype
) -> None:
    tolerance: Any = {"rtol": 0.0, "atol": 1e-10 if dtype == torch.float64 else 2e-6}
    sharded = build(config(kv_heads), groups, name, options, seed=3)
    sharded.model.to(dtype)
    reference = plain(InternLM2(config(kv_heads), seed=3).to(dtype))
    step = whole_step(groups.data.size)
    own = own_step(step, groups.data.rank)
    first = slice(groups.data.rank * MICRO, None)
    for ours, theirs in zip(logits(sharded, own), list(logits(reference, step))[first], strict=False):
        expected = own_logits(theirs, sharded) if options.parallel_output else theirs
        torch.testing.assert_close(ours, expected, **tolerance)
    loss, norm = run(sharded, own, reduction)
    expected_loss, expected_norm = run(reference, step, reduction)
    torch.testing.assert_close(loss, expected_loss, **tolerance)
    assert norm == pytest.approx(expected_norm, rel=0, abs=tolerance["atol"])
    expected_parameters = dict(reference.model.named_parameters())
    for parameter_name, parameter in sharded.model.named_parameters():
        gradient, placement = parameter.grad, sharded.placements[parameter_name]
        assert gradient is not None
        expected_gradient = expected_parameters[parameter_name].grad
        torch.testing.assert_close(whole_parameter(gradient, placement), expected_gradient, **tolerance)
    for model in (sharded.model, reference.model):
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    for parameter_name, parameter in sharded.model.named_parameters():
        expected_part = own_shard(expected_parameters[parameter_name], sharded.placements[parameter_name])
        torch.testing.assert_close(parameter.detach(), expected_part.detach(), **tolerance)


SIZES: list[tuple[int, ModeName, int, int | None, int]] = [
    *[(world, "mtp", tp, None, 8) for world, tp in [(2, 1), (2, 2), (4, 2), (4, 4)]],
    *[(world, "msp", tp, None, 8) for world, tp in [(2, 2), (4, 2)]],
    *[(world, "fsp", tp, None, 8) for world, tp in [(2, 2), (4, 4)]],
    *[(2, "isp", sp, wp, 2) for sp, wp in [(1, 1), (1, 2), (2, 1), (2, 2)]],
    *[(4, "isp", sp, wp, 2) for sp, wp in [(1, 4), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4)]],
    (8, "msp", 8, None, 8),
    (8, "isp", 4, 2, 2),
    (8, "isp", 8, 8, 2),
]
"""World, mode, tp, wp, key/value heads: in isp fewer of them than ranks of a sequence."""


@pytest.mark.parametrize(("world", "name", "tp", "wp", "kv_heads"), SIZES)
def test_a_mode_is_the_plain_model(
    pool: Pool, world: int, name: ModeName, tp: int, wp: int | None, kv_heads: int
) -> None:
    pool.run(world, compare_all, name, tp, wp, kv_heads)


def compare_unpacked(name: ModeName, tp: int, wp: int | None) -> None:
    """Rows of one sample each, of unequal lengths, without positions: each starts at 0 on the first rank only."""
    sharded = build(config(4), make_groups(tp, wp), name, seed=3)
    sharded.model.double()
    reference = plain(InternLM2(config(4), seed=3).double())
    ids, labels = torch.zeros(3, 16, dtype=torch.int64), torch.full((3, 16), -100)
    for row, sample in enumerate(random_samples([16, 5, 9], 64)):
        ids[row, : len(sample)] = torch.tensor(sample)
        labels[row, : len(sample) - 1] = torch.tensor(sample[1:])
    loss, expected = (micro_loss(model, {"input_ids": ids}, labels, 27) for model in (sharded, reference))
    torch.autograd.backward([loss, expected])
    sum_gradients(sharded)
    total = all_reduce(loss.detach(), sharded.mode.sum_loss) / sharded.groups.data.size
    torch.testing.assert_close(total, expected.detach(), rtol=0, atol=1e-10)
    for (parameter_name, parameter), other in zip(
        sharded.model.named_parameters(), reference.model.parameters(), strict=True
    ):
        gradient = whole_parameter(parameter.grad, sharded.placements[parameter_name])  # type: ignore[arg-type]
        torch.testing.assert_close(gradient / sharded.groups.data.size, other.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("name", "tp", "wp"), [("mtp", 2, None), ("msp", 4, None), ("fsp", 2, None), ("isp", 4, 2)])
def test_unpacked_rows_are_the_plain_model_too(pool: Pool, name: ModeName, tp: int, wp: int | None) -> None:
    pool.run(4, compare_unpacked, name, tp, wp)


def test_an_unpacked_row_gives_the_logits_it_gives_alone() -> None:
    model = plain(InternLM2(config(4)).double())
    samples = random_samples([8, 3], 64)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = torch.tensor(sample)
    rows = forward(model, {"input_ids": ids})
    for row, sample in enumerate(samples):
        alone = forward(model, {"input_ids": torch.tensor([sample])})
        torch.testing.assert_close(rows[row, : len(sample)], alone[0], rtol=0, atol=1e-12)


def forward(model: ShardedModel, data: dict[str, Any]) -> Tensor:
    pack = with_rows(data)
    out: Tensor = model.model(pack["input_ids"], pack["cu_seqlens"], pack["indexes"], pack["max_seqlen"])
    return out


@pytest.mark.parametrize(
    ("name", "tp", "wp", "message"),
    [
        ("mtp", 4, None, "mtp cannot cut 8 query and 2 key/value heads over tp 4: use a tp that divides 2, or isp"),
        ("fsp", 3, None, "tp 3 does not divide the world of 4 ranks"),
        ("msp", 2, 4, "msp cuts weights over its tensor group of 2 and cannot use wp 4: leave wp out, or use isp"),
        ("isp", 2, 3, "wp 3 does not divide the world of 4 ranks"),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_the_reason(
    pool: Pool, name: ModeName, tp: int, wp: int | None, message: str
) -> None:
    for reason in pool.run(4, refusal, name, tp, wp, config(2)):
        assert message in reason


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (ModelConfig(24, 1, num_heads=6, num_kv_heads=2, ffn_size=48), "isp cannot deal 6 query and 2 key/value heads"),
        (ModelConfig(48, 1, num_heads=12, num_kv_heads=6, ffn_size=48), "6 key/value heads to sp 4: use an sp that"),
        (
            ModelConfig(32, 1, 8, 4, ffn_size=50),
            "50 rows or columns of model.layers.0.feed_forward.w1.weight cannot be",
        ),
        (ModelConfig(32, 1, 8, 4, ffn_size=48, vocab_size=66), "66 rows or columns of output.weight cannot be cut"),
    ],
)
def test_shapes_that_cannot_be_cut_are_refused_with_the_reason(pool: Pool, shape: ModelConfig, message: str) -> None:
    for reason in pool.run(4, refusal, "isp", 4, 4, shape):
        assert message in reason


def refusal(name: ModeName, tp: int, wp: int | None, shape: ModelConfig) -> str:
    try:
        build(shape, make_groups(tp, wp), name)
    except ValueError as error:
        return str(error)
    return ""


def odd_lengths(name: ModeName) -> str:
    sharded = build(config(4), make_groups(2), name)
    data, labels = make_step([random_samples([5, 10], 64)], 15)
    try:
        accumulate_gradients(sharded, data, labels, [14])
    except (ValueError, PackhouseError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["msp", "fsp", "isp"])
def test_packs_that_cannot_be_cut_are_refused_with_the_reason(pool: Pool, name: ModeName) -> None:
    assert all("15 tokens" in reason and "2 ranks" in reason for reason in pool.run(2, odd_lengths, name))
