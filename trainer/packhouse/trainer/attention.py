"""Causal attention over the segments of a pack, at a cost that follows the segments and never the pack.

No mask is built anywhere. A pack of 32,768 tokens made of 300 short segments costs the sum of the 300 small triangles,
in time and in memory; padding is a segment like any other. On the CPU a plain loop over the segments was measured
against batches of equal and of right-padded segments: the loop won for all but segments of about 20 tokens, because
gathering the segments into batches moves more memory than the calls cost.

Shape suffixes: B rows, T tokens of a row, S tokens of one segment, P tokens in the cache, N query heads, K key/value
heads, H numbers per head.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn


@dataclass(slots=True)
class LayerCache:
    """The keys and values (B, P, K, H) of one layer, of all tokens so far; None before the first."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def append(self, k_BTKH: Tensor, v_BTKH: Tensor) -> tuple[Tensor, Tensor]:
        """Add the next tokens; returns all keys and all values."""
        self.keys = k_BTKH if self.keys is None else torch.cat((self.keys, k_BTKH), dim=1)
        self.values = v_BTKH if self.values is None else torch.cat((self.values, v_BTKH), dim=1)
        return self.keys, self.values


class CachedAttention(nn.Module):
    """Attention of new tokens to those in a cache and to one another, as a module without parameters."""

    def forward(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, cache: LayerCache) -> Tensor:
        """Causal attention (B, T, N, H) of the queries; their keys and values are added to `cache` first."""
        first = cache.keys is None
        k_BPKH, v_BPKH = cache.append(k_BTKH, v_BTKH)
        q_BNTH, k_BKPH, v_BKPH = (x.transpose(1, 2) for x in (q_BTNH, k_BPKH, v_BPKH))
        tokens, total = q_BNTH.shape[2], k_BKPH.shape[2]
        # A long prompt, which finds the cache empty, and a single token need no mask of tokens × total.
        visible = None
        if not first and tokens > 1:
            visible = torch.ones(tokens, total, dtype=torch.bool, device=q_BTNH.device).tril(total - tokens)
        out_BNTH = F.scaled_dot_product_attention(
            q_BNTH, k_BKPH, v_BKPH, attn_mask=visible, is_causal=first, enable_gqa=True
        )
        return out_BNTH.transpose(1, 2)


class VarlenAttention(nn.Module):
    """`varlen_attention` as a module without parameters, so that hooks can stand before and behind it."""

    def forward(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """See `varlen_attention`."""
        return varlen_attention(q_BTNH, k_BTKH, v_BTKH, cu_seqlens, max_seqlen)


def varlen_attention(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Causal grouped-query attention in which a token sees its own segment only; returns (B, T, N, H) in q's dtype.

    `q_BTNH` (B, T, N, H), `k_BTKH` and `v_BTKH` (B, T, K, H) are floating point; query head n reads key/value head
    n // (N / K). `cu_seqlens` (n+1,) int32 holds the segment borders from 0 to B * T, through all the rows, and
    `max_seqlen` the longest segment. Raises ValueError when the borders do not run from 0 to B * T (checked on the CPU
    only: on a GPU the check would wait for the device).
    """
    rows = q_BTNH.shape[0]
    if rows > 1:
        q_BTNH, k_BTKH, v_BTKH = (x.flatten(0, 1)[None] for x in (q_BTNH, k_BTKH, v_BTKH))
        return varlen_attention(q_BTNH, k_BTKH, v_BTKH, cu_seqlens, max_seqlen).view(rows, -1, *q_BTNH.shape[2:])
    if q_BTNH.is_cuda and q_BTNH.dtype in (torch.float16, torch.bfloat16):
        return _fused(q_BTNH[0], k_BTKH[0], v_BTKH[0], cu_seqlens, max_seqlen)[None]
    return _by_segment(q_BTNH, k_BTKH, v_BTKH, cu_seqlens.tolist())


def _fused(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """All segments in one kernel; it exists for 16-bit types on a GPU only, so no CPU test reaches it."""
    causal = (-1, 0)
    out = varlen_attn(
        q_TNH, k_TKH, v_TKH, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, window_size=causal, enable_gqa=True
    )
    assert isinstance(out, Tensor)
    return out


def _by_segment(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, borders: list[int]) -> Tensor:
    lengths = [stop - start for start, stop in pairwise(borders)]
    tokens = q_BTNH.shape[1]
    if not lengths or borders[0] != 0 or borders[-1] != tokens or min(lengths) < 0:
        raise ValueError(
            f"cu_seqlens {_shown(borders)} must rise from 0 to the pack's {tokens} tokens: rebuild the batch"
        )
    q_BNTH, k_BKTH, v_BKTH = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
    pieces = zip(*(torch.split(x, lengths, dim=2) for x in (q_BNTH, k_BKTH, v_BKTH)), strict=True)
    out_BNSH = [F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) for q, k, v in pieces]
    return torch.cat(out_BNSH, dim=2).transpose(1, 2)


def _shown(borders: list[int]) -> str:
    return str(borders) if len(borders) <= 6 else f"[{borders[0]}, {borders[1]}, ..., {borders[-1]}]"
