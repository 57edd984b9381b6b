"""Which collectives a layer costs in each mode, and the primitives themselves."""

from collections import Counter

import pytest
import torch
from tests.trainer.pool import Pool
from tests.trainer.recorder import Recorder
from tests.trainer.steps import make_step, random_samples

from packhouse.trainer.model import ModelConfig
from packhouse.trainer.parallel import ModeName, Options, build, make_groups
from packhouse.trainer.parallel.collectives import exchange, gather_sum_backward, own_part, sum_scatter
from packhouse.trainer.parallel.groups import rank_table
from packhouse.trainer.step import micro_batches, micro_loss

Counts = tuple[Counter[str], Counter[str]]


def one_pass(name: ModeName, tp: int, wp: int | None, layers: int, options: Options) -> Counts:
    """Collectives of a forward and of a backward pass."""
    config = ModelConfig(32, layers, num_heads=4, num_kv_heads=4, ffn_size=48, vocab_size=64)
    sharded = build(config, make_groups(tp, wp), name, options)
    step = make_step([random_samples([9, 7], 64)], 16)
    ((pack, targets),) = micro_batches(*step, torch.device("cpu"))
    with Recorder() as recorder:
        loss = micro_loss(sharded, pack, targets, 14)
        forward = recorder.count()
        torch.autograd.backward(loss)
        return forward, recorder.count()


def per_layer(pool: Pool, name: ModeName, tp: int, wp: int | None, options: Options) -> Counts:
    """What one layer more costs."""
    (more, *_), (less, *_) = (pool.run(4, one_pass, name, tp, wp, layers, options) for layers in (3, 2))
    return more[0] - less[0], more[1] - less[1]


TABLE: list[tuple[ModeName, dict[str, int], dict[str, int]]] = [
    ("mtp", {"all-reduce": 2}, {"all-reduce": 3}),
    ("msp", {"all-gather": 3, "reduce-scatter": 2}, {"all-gather": 2, "reduce-scatter": 3}),
    ("fsp", {"all-gather": 3, "reduce-scatter": 2}, {"all-gather": 5, "reduce-scatter": 3}),
    ("isp", {"all-gather": 5, "all-to-all": 3}, {"all-gather": 5, "reduce-scatter": 5, "all-to-all": 3}),
]


@pytest.mark.parametrize(("name", "forward", "backward"), TABLE)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_layer_costs_what_the_table_says(
    pool: Pool, name: ModeName, forward: dict[str, int], backward: dict[str, int], overlap: bool
) -> None:
    assert per_layer(pool, name, 2, None, Options(overlap=overlap)) == (forward, backward)


def test_sizes_of_one_cost_nothing(pool: Pool) -> None:
    assert per_layer(pool, "isp", 1, 4, Options()) == ({"all-gather": 5}, {"all-gather": 5, "reduce-scatter": 5})
    assert per_layer(pool, "isp", 4, 1, Options()) == ({"all-to-all": 3}, {"all-to-all": 3})
    assert per_layer(pool, "mtp", 1, None, Options()) == ({}, {})


@pytest.mark.parametrize("overlap", [True, False])
def test_a_recomputed_layer_adds_its_forward_pass_once(pool: Pool, overlap: bool) -> None:
    """And only that layer: of three, two are recomputed, and nothing is gathered twice for the third."""
    plain, some = (pool.run(4, one_pass, "isp", 2, 2, 3, Options(True, overlap, layers))[0] for layers in (0, 2))
    assert some[0] == plain[0]
    assert some[1] - plain[1] == {"all-gather": 2 * 5, "all-to-all": 2 * 3}
    (_, recomputed), (_, kept) = (pool.run(4, one_pass, "msp", 2, None, 3, Options(True, True, n))[0] for n in (1, 0))
    # torch stops a recomputation at the last tensor that is needed: the layer's last reduce-scatter is spared.
    assert recomputed - kept == {"all-gather": 3, "reduce-scatter": 1}


def test_embedding_head_and_loss_cost_what_the_table_says(pool: Pool) -> None:
    """What is left when the layers are taken away."""
    rest = {}
    for name, forward, backward in TABLE:
        ((ours_forward, ours_backward), *_) = pool.run(4, one_pass, name, 2, None, 2, Options())
        for counts, layer in ((ours_forward, forward), (ours_backward, backward)):
            counts.subtract({kind: 2 * number for kind, number in layer.items()})
        rest[name] = {k: v for k, v in ours_forward.items() if v}, {k: v for k, v in ours_backward.items() if v}
    loss = {"all-reduce": 2}
    assert rest == {
        "mtp": ({"all-gather": 1, **loss}, {"all-reduce": 1}),
        "msp": ({"all-gather": 2, **loss}, {"all-gather": 1, "reduce-scatter": 1}),
        "fsp": ({"all-gather": 2, **loss}, {"all-gather": 2, "reduce-scatter": 1}),
        "isp": ({"all-gather": 2}, {"all-gather": 1, "reduce-scatter": 2}),
    }


def order(overlap: bool) -> str:
    """The collectives of a forward pass of two layers, in order: W for a weight, X for an exchange of heads."""
    config = ModelConfig(32, 2, num_heads=4, num_kv_heads=4, ffn_size=48, vocab_size=64)
    sharded = build(config, make_groups(2, 2), "isp", Options(overlap=overlap))
    ((pack, targets),) = micro_batches(*make_step([random_samples([9, 7], 64)], 16), torch.device("cpu"))
    with Recorder() as recorder:
        micro_loss(sharded, pack, targets, 14)
        return "".join({"all-gather": "W", "all-to-all": "X"}[kind] for kind, _, _ in recorder.calls)


def test_weights_of_the_next_layer_follow_the_exchange_of_this_one(pool: Pool) -> None:
    embedding, layer, head, exchange_heads = "W", "WWWWW", "W", "XXX"
    ahead = embedding + layer + exchange_heads + layer + exchange_heads + head
    assert pool.run(2, order, True) == [ahead] * 2
    assert pool.run(2, order, False) == [embedding + 2 * (layer[:1] + exchange_heads + layer[1:]) + head] * 2


def test_groups_lie_as_the_reference_has_them() -> None:
    table = rank_table(16, tp=4, wp=2)
    assert table["tensor"] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert table["data"] == [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    assert table["weight"] == [(r, r + 1) for r in range(0, 16, 2)]
    assert table["weight_data"] == [tuple(range(0, 16, 2)), tuple(range(1, 16, 2))]


def primitives() -> None:
    """Each operation and its gradient, against the same on whole tensors."""
    group = make_groups(4).tensor
    whole = torch.arange(2 * 8 * 4 * 3, dtype=torch.float64).view(2, 8, 4, 3)
    part = own_part(whole, group, 1).requires_grad_()
    gathered = gather_sum_backward(part, group, 1)
    assert torch.equal(gathered, whole)
    gathered.backward(whole)  # type: ignore[no-untyped-call]
    assert torch.equal(part.grad, 4 * part)  # type: ignore[arg-type]
    x = (whole * (group.rank + 1)).requires_grad_()
    scattered = sum_scatter(x, group, 1)
    assert torch.equal(scattered, own_part(whole * 10, group, 1))
    scattered.backward(part.detach())  # type: ignore[no-untyped-call]
    assert torch.equal(x.grad, whole)  # type: ignore[arg-type]
    tokens = own_part(whole, group, 1).clone().requires_grad_()
    heads = exchange(tokens, group, scatter=2, gather=1)
    assert torch.equal(heads, own_part(whole, group, 2))
    heads.backward(own_part(whole, group, 2))  # type: ignore[no-untyped-call]
    assert torch.equal(tokens.grad, tokens)  # type: ignore[arg-type]


def test_operations_and_their_gradients(pool: Pool) -> None:
    pool.run(4, primitives)
