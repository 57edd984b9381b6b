"""Rotary positions: dynamic scaling as transformers has it, per segment, and in float32 whatever the weights are."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.trainer.pool import Pool
from tests.trainer.steps import make_step, random_samples

from packhouse.trainer.generate import generate
from packhouse.trainer.model import CONFIGS, InternLM2
from packhouse.trainer.parallel import build, make_groups, plain
from packhouse.trainer.rotary import RotaryEmbedding, rotary_tables, segment_lengths
from packhouse.trainer.step import micro_batches

SCALED = replace(CONFIGS["tiny"], rope_factor=2.0, max_position=8)


@pytest.mark.parametrize("length", [5, 8, 9, 40])
def test_dynamic_scaling_is_that_of_transformers(length: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}
    shape = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 8}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**shape, rope_parameters=rope))
    cos, sin = theirs(torch.zeros(1), torch.arange(length)[None])
    ours = RotaryEmbedding(16, 1e6, 2.0, 8)(torch.arange(length), torch.full((length,), length))
    for mine, other in zip(ours, (cos, sin), strict=True):
        torch.testing.assert_close(mine, other[0, :, :8], rtol=0, atol=2e-6)


def run(model: InternLM2, samples: list[list[int]]) -> Any:
    data, _ = make_step([samples], sum(map(len, samples)))
    return model(data["input_ids"], data["cu_seqlens"][0], data["indexes"][0], max(map(len, samples)))


def test_a_segment_is_scaled_by_its_own_length() -> None:
    model, samples = InternLM2(SCALED).double(), random_samples([20, 4, 12])
    packed = run(model, samples)
    alone = torch.cat([run(model, [sample]) for sample in samples], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-10)
    unscaled = InternLM2(CONFIGS["tiny"]).double()
    assert not torch.allclose(run(unscaled, samples)[:, :20], packed[:, :20])
    torch.testing.assert_close(run(unscaled, samples)[:, 20:24], packed[:, 20:24], rtol=0, atol=1e-10)


def scaled_in_isp() -> None:
    model = build(SCALED, make_groups(2, 2), "isp")
    model.model.double()
    ((pack, labels),) = micro_batches(*make_step([random_samples([20, 4])], 24), torch.device("cpu"))
    own, _ = model.own_data(pack, labels)
    ours = model.model(own["input_ids"], own["cu_seqlens"], own["indexes"], own["max_seqlen"])
    expected = run(InternLM2(SCALED).double(), random_samples([20, 4]))
    torch.testing.assert_close(ours, expected.chunk(2, dim=1)[model.groups.tensor.rank], rtol=0, atol=1e-10)


def test_a_part_of_a_sequence_is_scaled_by_the_whole_segment(pool: Pool) -> None:
    pool.run(2, scaled_in_isp)


def test_generation_past_the_trained_length_is_finite_and_repeatable() -> None:
    model = plain(InternLM2(SCALED))
    assert generate(model, [5, 6, 7], 20) == generate(model, [5, 6, 7], 20)


@pytest.mark.parametrize(("borders", "rows", "expected"), [([0, 3, 3, 5], 1, [3, 3, 3, 2, 2]), ([0, 4, 8], 2, [4] * 4)])
def test_lengths_of_segments(borders: list[int], rows: int, expected: list[int]) -> None:
    assert segment_lengths(torch.tensor(borders, dtype=torch.int32), rows).tolist() == expected


def test_tables_are_float32_whatever_the_weights_are() -> None:
    """In bfloat16 the angles of positions 300 and 301 would be the same."""
    model, tables = InternLM2(CONFIGS["tiny"]).bfloat16(), []
    model.model.rotary_emb.register_forward_hook(lambda module, args, out: tables.extend(out))
    run(model, random_samples([400]))
    assert {table.dtype for table in tables} == {torch.float32}
    torch.testing.assert_close(tables[0], rotary_tables(torch.arange(400), 16, 1e6)[0], rtol=0, atol=0)
    assert not torch.equal(tables[0][300], tables[0][301])


def test_a_factor_that_shrinks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rope_factor 0\.5 would shrink positions"):
        replace(SCALED, rope_factor=0.5)
