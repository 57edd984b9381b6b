"""The shape at every point that the specification of the data flow names, in every mode."""

from collections import Counter
from typing import Any

import pytest
import torch
from tests.trainer.pool import Pool
from tests.trainer.steps import make_step, random_samples

from packhouse.trainer.model import ModelConfig
from packhouse.trainer.parallel import ModeName, Options, build, make_groups
from packhouse.trainer.step import micro_batches

T, D, N, K, F, V = 24, 48, 8, 4, 96, 128
H = D // N
QKV = D + 2 * K * H
Shapes = dict[str, tuple[int, ...]]


def shapes(name: ModeName, tp: int, wp: int | None, parallel_output: bool) -> Shapes:
    """Weights, and what goes into attention and comes out of each module, by name."""
    config = ModelConfig(D, 1, num_heads=N, num_kv_heads=K, ffn_size=F, vocab_size=V)
    sharded = build(config, make_groups(tp, wp), name, Options(parallel_output))
    seen: Shapes = {n.removesuffix(".weight"): tuple(x.shape) for n, x in sharded.model.named_parameters()}

    def after(place: str) -> Any:
        return lambda module, args, out: seen.update({f"{place} out": tuple(out.shape)})

    def before(module: Any, args: Any) -> None:
        seen.update({"q": tuple(args[0].shape), "k": tuple(args[1].shape), "v": tuple(args[2].shape)})

    for place, module in sharded.model.named_modules():
        if place.endswith("inner_attn"):
            module.register_forward_pre_hook(before)
        if place.rpartition(".")[2] in POINTS:
            module.register_forward_hook(after(place))
    ((pack, labels),) = micro_batches(*make_step([random_samples([20, 4], V)], T), torch.device("cpu"))
    own, own_labels = sharded.own_data(pack, labels)
    seen |= {"input_ids": tuple(own["input_ids"].shape), "labels": tuple(own_labels.shape)}
    sharded.model(own["input_ids"], own["cu_seqlens"], own["indexes"], own["max_seqlen"])
    return {key.removeprefix("model.").removeprefix("layers.0."): shape for key, shape in seen.items()}


POINTS = {
    "tok_embeddings",
    "wqkv",
    "inner_attn",
    "wo",
    "w1",
    "w3",
    "w2",
    "attention_norm",
    "ffn_norm",
    "norm",
    "output",
}


def expected(name: ModeName, tp: int, wp: int, parallel_output: bool) -> Shapes:
    """The specification, with sp for the sequence size of isp, wp for its weight size and tp for the others."""
    isp, between = name == "isp", T if name == "mtp" else T // tp
    cut = 1 if isp else tp
    inside = T // tp if isp else T
    logits = (1, T, V // tp) if not isp else (1, T // tp, V)
    return {
        "tok_embeddings": (V, D // wp),
        "attention.wqkv": (QKV // wp, D),
        "attention.wo": (D // wp, D) if isp else (D, D // tp),
        "feed_forward.w1": (F // wp, D),
        "feed_forward.w3": (F // wp, D),
        "feed_forward.w2": (D // wp, F) if isp else (D, F // tp),
        "attention_norm": (D,),
        "ffn_norm": (D,),
        "norm": (D,),
        "output": (V // wp, D),
        "input_ids": (1, T // tp) if isp else (1, T),
        "labels": (1, T // tp) if isp and parallel_output else (1, T),
        "tok_embeddings out": (1, between, D),
        "attention_norm out": (1, between, D),
        "attention.wqkv out": (1, inside, QKV // cut),
        "q": (1, T, N // tp, H),
        "k": (1, T, K // tp, H),
        "v": (1, T, K // tp, H),
        "attention.inner_attn out": (1, inside, N // cut, H),
        "attention.wo out": (1, between, D),
        "ffn_norm out": (1, between, D),
        "feed_forward.w1 out": (1, inside, F // cut),
        "feed_forward.w3 out": (1, inside, F // cut),
        "feed_forward.w2 out": (1, between, D),
        "norm out": (1, between, D),
        "output out": logits if parallel_output else (1, T, V),
    }


@pytest.mark.parametrize(("name", "wp"), [("mtp", None), ("msp", None), ("fsp", None), ("isp", 4), ("isp", 2)])
@pytest.mark.parametrize("parallel_output", [True, False])
def test_shapes_are_those_of_the_specification(
    pool: Pool, name: ModeName, wp: int | None, parallel_output: bool
) -> None:
    found = pool.run(4, shapes, name, 2, wp, parallel_output)
    assert found == [expected(name, 2, wp or 2, parallel_output)] * 4


def kept(name: ModeName, wp: int | None) -> Counter[tuple[int, ...]]:
    """Shapes of what a forward pass keeps for the backward pass."""
    config = ModelConfig(D, 1, num_heads=N, num_kv_heads=K, ffn_size=2 * F, vocab_size=V)
    sharded = build(config, make_groups(2, wp), name)
    ((pack, labels),) = micro_batches(*make_step([random_samples([20, 4], V)], T), torch.device("cpu"))
    own, _ = sharded.own_data(pack, labels)
    seen: Counter[tuple[int, ...]] = Counter()

    def note(x: torch.Tensor) -> torch.Tensor:
        seen[tuple(x.shape)] += 1
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        sharded.model(own["input_ids"], own["cu_seqlens"], own["indexes"], own["max_seqlen"])
    return seen


def test_only_msp_keeps_gathered_inputs_and_isp_keeps_no_weight(pool: Pool) -> None:
    """wqkv, w1, w3 and the head take the gathered sequence; isp would have five whole weights, and keeps none."""
    msp, fsp, isp = (pool.run(4, kept, *case)[0] for case in (("msp", None), ("fsp", None), ("isp", 4)))
    # One other tensor of that shape is the result of wqkv: half of QKV is D.
    assert [seen[1, T, D] + seen[T, D] for seen in (msp, fsp, isp)] == [4 + 1, 1, 0]
    whole_weights = {(QKV, D), (D, QKV), (D, D), (2 * F, D), (D, 2 * F), (V, D), (D, V)}
    assert not whole_weights & isp.keys()
