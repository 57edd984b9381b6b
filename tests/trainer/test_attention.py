"""Attention by segments: the numbers of a masked softmax, without the mask's memory."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from packhouse.trainer.attention import CachedAttention, LayerCache, _fused, varlen_attention


def borders(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def random_qkv(tokens: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, tokens, heads, 8), (1, tokens, kv_heads, 8), (1, tokens, kv_heads, 8)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("lengths", [[7], [1, 1, 1], [3, 9, 1, 4], [5, 0, 6]])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_equals_a_masked_softmax_over_the_whole_pack(lengths: list[int], heads: int, kv_heads: int) -> None:
    q, k, v = random_qkv(sum(lengths), heads, kv_heads)
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    visible = (segment[:, None] == segment[None, :]) & torch.ones(len(segment), len(segment)).tril().bool()
    wide_k, wide_v = (x.repeat_interleave(heads // kv_heads, dim=2) for x in (k, v))
    scores = torch.einsum("btnh,bsnh->bnts", q, wide_k) / math.sqrt(8)
    expected = torch.einsum("bnts,bsnh->btnh", scores.masked_fill(~visible, -math.inf).softmax(-1), wide_v)
    torch.testing.assert_close(varlen_attention(q, k, v, borders(lengths), max(lengths)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lengths", [[128] * 256, [1, 63] * 512, [2048]], ids=["32k-even", "32k-uneven", "2k-single"])
def test_no_tensor_is_larger_than_the_queries(lengths: list[int], largest_tensor: Any) -> None:
    q, k, v = (x.requires_grad_() for x in random_qkv(sum(lengths), 2, 1, torch.float32))
    with largest_tensor:
        torch.autograd.backward(varlen_attention(q, k, v, borders(lengths), max(lengths)).sum())
    assert largest_tensor.numel[torch.float32] == q.numel()


@pytest.mark.parametrize("cu_seqlens", [[0, 4], [1, 6], [0, 5, 3, 6], [0]])
def test_borders_that_do_not_span_the_pack_are_refused(cu_seqlens: list[int]) -> None:
    q, k, v = random_qkv(6, 2, 1)
    with pytest.raises(ValueError, match="must rise from 0 to the pack's 6 tokens"):
        varlen_attention(q, k, v, torch.tensor(cu_seqlens, dtype=torch.int32), 6)


def test_rows_are_segments_of_their_own() -> None:
    q, k, v = random_qkv(12, 4, 2)
    packed = varlen_attention(q, k, v, borders([6, 6]), 6)
    q, k, v = (x.view(2, 6, -1, 8) for x in (q, k, v))
    rows = varlen_attention(q, k, v, borders([6, 6]), 6)
    torch.testing.assert_close(rows.view_as(packed), packed, rtol=0, atol=0)


@pytest.mark.parametrize("chunks", [[9], [4, 1, 1, 3], [1] * 9])
def test_a_cache_gives_what_the_whole_gives(chunks: list[int]) -> None:
    q, k, v = random_qkv(9, 4, 2)
    cache, attend = LayerCache(), CachedAttention()
    pieces = zip(*(torch.split(x, chunks, dim=1) for x in (q, k, v)), strict=True)
    out = torch.cat([attend(*piece, cache) for piece in pieces], dim=1)
    torch.testing.assert_close(out, varlen_attention(q, k, v, borders([9]), 9), rtol=0, atol=1e-12)


def test_a_long_prompt_makes_no_mask(largest_tensor: Any) -> None:
    q, k, v = random_qkv(4000, 2, 1, torch.float32)
    with largest_tensor:
        CachedAttention()(q, k, v, LayerCache())
    assert torch.bool not in largest_tensor.numel
    assert largest_tensor.numel[torch.float32] == q.numel()


def test_the_fused_kernel_takes_the_arguments_it_is_given() -> None:
    q, k, v = (x[0].bfloat16().to("meta") for x in random_qkv(10, 4, 2))
    assert _fused(q, k, v, borders([4, 6]).to("meta"), 6).shape == (10, 4, 8)
