"""The model: packing changes nothing, and the layout is the public checkpoints'."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from packhouse.trainer.loss import cross_entropy
from packhouse.trainer.model import CONFIGS, Attention, InternLM2, ModelConfig, split_qkv
from packhouse.trainer.rotary import rotary_tables, rotate

TINY = CONFIGS["tiny"]


def run_pack(model: InternLM2, data: dict[str, Any]) -> Tensor:
    borders: Tensor = data["cu_seqlens"][0]
    logits: Tensor = model(data["input_ids"], borders, data["indexes"][0], int(borders.diff().max()))
    return logits


@pytest.mark.parametrize(("lengths", "pack_length"), [([9], 9), ([5, 1, 9], 15), ([6, 7], 20), ([1, 1, 1], 40)])
def test_a_pack_gives_the_logits_and_gradients_of_its_samples_alone(
    make_step: Callable[..., Any], random_samples: Callable[..., Any], lengths: list[int], pack_length: int
) -> None:
    model, samples = InternLM2(TINY).double(), random_samples(lengths)
    data, labels = make_step([samples], pack_length)
    packed = run_pack(model, data)
    torch.autograd.backward(cross_entropy(packed, labels, 10))
    packed_grads = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    start = 0
    for sample in samples:
        alone_data, alone_labels = make_step([[sample]], len(sample))
        alone = run_pack(model, alone_data)
        torch.testing.assert_close(packed[:, start : start + len(sample)], alone, rtol=0, atol=1e-10)
        torch.autograd.backward(cross_entropy(alone, alone_labels, 10))
        start += len(sample)
    alone_grads = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    torch.testing.assert_close(packed_grads, alone_grads, rtol=0, atol=1e-10)


def test_fused_rows_are_stored_per_key_value_head() -> None:
    q, k, v = (part.flatten().tolist() for part in split_qkv(torch.arange(16), q_per_kv=2, head_dim=2))
    assert q == [0, 1, 2, 3, 8, 9, 10, 11]
    assert k == [4, 5, 12, 13]
    assert v == [6, 7, 14, 15]


def llama_with_the_weights_of(model: InternLM2) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = model.config
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
    )
    names = {"wo": "self_attn.o_proj", "w1": "mlp.gate_proj", "w2": "mlp.down_proj", "w3": "mlp.up_proj"}
    names |= {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    state = {}
    for name, weight in model.state_dict().items():
        *path, leaf, _ = name.split(".")
        layer = ".".join(path[:3])
        if leaf == "wqkv":
            for part, rows in zip("qkv", split_qkv(weight.T, shape.q_per_kv, shape.head_dim), strict=True):
                state[f"{layer}.self_attn.{part}_proj.weight"] = rows.flatten(-2).T
        elif leaf in names:
            state[f"{layer}.{names[leaf]}.weight"] = weight
        else:
            state[name.replace("tok_embeddings", "embed_tokens").replace("output", "lm_head")] = weight
    llama = LlamaForCausalLM(config)
    llama.load_state_dict(state)
    return llama.eval()


def test_logits_are_those_of_a_llama_with_the_same_weights(
    make_step: Callable[..., Any], random_samples: Callable[..., Any]
) -> None:
    model = InternLM2(ModelConfig(48, 2, num_heads=6, num_kv_heads=2, ffn_size=80, vocab_size=512))
    generator = torch.Generator().manual_seed(9)
    for parameter in model.parameters():  # norms of 1 and weights of 0.02 would hide many a mistake
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    samples = random_samples([40, 3, 100])
    packed = run_pack(model, make_step([samples], 143)[0])
    llama = llama_with_the_weights_of(model)
    expected = torch.cat([llama(torch.tensor([sample])).logits for sample in samples], dim=1)
    assert expected.std() > 0.5
    torch.testing.assert_close(packed, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "count"), [("1.8b", 1_889_110_016), ("7b", 7_737_708_544), ("20b", 19_861_149_696)])
def test_parameter_counts_are_the_published_ones(name: str, count: int) -> None:
    with torch.device("meta"):
        model = InternLM2(CONFIGS[name])
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_parameter_names_and_shapes_are_those_of_public_checkpoints() -> None:
    model = InternLM2(ModelConfig(16, 1, num_heads=4, num_kv_heads=2, ffn_size=24, vocab_size=40))
    assert {name: tuple(weight.shape) for name, weight in model.state_dict().items()} == {
        "model.tok_embeddings.weight": (40, 16),
        "model.layers.0.attention.wqkv.weight": (32, 16),
        "model.layers.0.attention.wo.weight": (16, 16),
        "model.layers.0.feed_forward.w1.weight": (24, 16),
        "model.layers.0.feed_forward.w2.weight": (16, 24),
        "model.layers.0.feed_forward.w3.weight": (24, 16),
        "model.layers.0.attention_norm.weight": (16,),
        "model.layers.0.ffn_norm.weight": (16,),
        "model.norm.weight": (16,),
        "output.weight": (40, 16),
    }


def test_half_of_the_weights_computes_half_of_the_heads() -> None:
    whole, x = Attention(TINY).double(), torch.randn(1, 10, 64, dtype=torch.float64)
    rotary, borders = rotary_tables(torch.arange(10), 16, 1e6), torch.tensor([0, 10], dtype=torch.int32)
    expected, total = whole(x, rotary, borders, 10), torch.zeros_like(x)
    for rows, columns in zip(whole.wqkv.weight.chunk(2), whole.wo.weight.chunk(2, dim=1), strict=True):
        half = Attention(TINY).double()
        half.wqkv.weight, half.wo.weight = torch.nn.Parameter(rows), torch.nn.Parameter(columns)
        total += half(x, rotary, borders, 10)
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-12)


def test_weights_follow_from_the_seed_alone() -> None:
    first, again, other = InternLM2(TINY, seed=3).state_dict(), InternLM2(TINY, seed=3), InternLM2(TINY, seed=4)
    torch.testing.assert_close(again.state_dict(), first, rtol=0, atol=0)
    assert not torch.equal(other.output.weight, first["output.weight"])
    again.bfloat16().init_weights(3)
    torch.testing.assert_close(again.output.weight, first["output.weight"].bfloat16(), rtol=0, atol=0)


def test_weights_that_write_into_the_stream_start_smaller() -> None:
    deviations = {name.split(".")[-2]: weight.std().item() for name, weight in InternLM2(TINY).state_dict().items()}
    assert [deviations[name] for name in ("wqkv", "w1", "w3", "output")] == pytest.approx([0.02] * 4, rel=0.05)
    assert [deviations[name] for name in ("wo", "w2")] == pytest.approx([0.02 / 4**0.5] * 2, rel=0.05)


def test_bfloat16_weights_give_bfloat16_logits_near_the_wide_ones(
    make_step: Callable[..., Any], random_samples: Callable[..., Any]
) -> None:
    data, _ = make_step([random_samples([30, 9])], 48)
    wide, narrow = run_pack(InternLM2(TINY), data), run_pack(InternLM2(TINY).bfloat16(), data)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), wide, rtol=0, atol=0.01)


def test_scores_of_far_tokens_depend_on_their_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 128, generator=torch.Generator().manual_seed(5))

    def score(q_at: int, k_at: int) -> float:
        tables = [rotary_tables(torch.tensor([at]), 128, 1e6) for at in (q_at, k_at)]
        return float((rotate(q, *tables[0]) * rotate(k, *tables[1])).sum())

    assert score(30_017, 30_000) == pytest.approx(score(17, 0), abs=0.02)
    assert score(30_018, 30_000) != pytest.approx(score(17, 0), abs=0.1)


def test_norms_of_bfloat16_take_the_variance_in_float32() -> None:
    norm = InternLM2(TINY).model.norm
    x = (torch.randn(50, 64, generator=torch.Generator().manual_seed(6)) * 300).bfloat16()
    wide = x.float()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + TINY.norm_eps)
    torch.testing.assert_close(norm.bfloat16()(x), expected.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize(("heads", "kv_heads", "message"), [(3, 1, "hidden_size 64"), (4, 3, "num_heads 4")])
def test_heads_that_do_not_divide_are_refused(heads: int, kv_heads: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(64, 1, num_heads=heads, num_kv_heads=kv_heads, ffn_size=8)
