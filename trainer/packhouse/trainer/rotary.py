"""Rotary positions: angle tables in float32, both ways to pair a head's numbers, and `dynamic` scaling.

Shape suffixes: B rows, T tokens of a row, N heads, H numbers per head.
"""

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """The angle tables of a model as a module without parameters, so that hooks can stand before it.

    With `scaling_factor` the base grows with the length of a token's own segment once that is past `max_position`: the
    `dynamic` NTK scaling of the public models (source: `dynamic` in transformers' rotary functions). Other segments of
    the pack have no say, so a packed sample still gives the logits that it gives alone.
    """

    def __init__(self, head_dim: int, base: float, scaling_factor: float | None, max_position: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.base = base
        self.scaling_factor = scaling_factor
        self.max_position = max_position

    def forward(self, indexes: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `rotary_tables`; `lengths` (T,), or (1,) for all, of each token's segment are needed to scale only."""
        if self.scaling_factor is None or lengths is None:
            return rotary_tables(indexes, self.head_dim, self.base)
        stretched = lengths.clamp(min=self.max_position).to(torch.float64) / self.max_position
        growth = self.scaling_factor * stretched - (self.scaling_factor - 1)
        bases = self.base * growth ** (self.head_dim / (self.head_dim - 2))
        return rotary_tables(indexes, self.head_dim, bases.to(torch.float32)[:, None])


def segment_lengths(cu_seqlens: Tensor, rows: int) -> Tensor:
    """The length of each token's segment, (T,) int64; of several equally long rows, which are one segment each, one's.

    `cu_seqlens` (n+1,) counts through all the rows, so T is its last entry divided by `rows`.
    """
    lengths = cu_seqlens.diff().to(torch.int64)
    return lengths.repeat_interleave(lengths)[: int(cu_seqlens[-1]) // rows]


def rotary_tables(indexes: Tensor, head_dim: int, base: float | Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine (T, H/2) float32 of each position's angles; `indexes` (T,) int64, `base` a number or (T, 1).

    Always float32: 16-bit angles would merge neighbouring positions of long segments.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=indexes.device) / head_dim
    angles = indexes.to(torch.float32)[:, None] * (1.0 / base**exponents)
    return angles.cos(), angles.sin()


def rotate(x_BTNH: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn the pairs of each head by its position's angles, in float32 or wider; same shape and dtype out.

    Pairs are (i, i + H/2), or (2i, 2i + 1) if `interleaved`: two orders of the same rows of `wqkv`.
    """
    cos, sin = cos[:, None, :], sin[:, None, :]
    left, right = (x_BTNH[..., ::2], x_BTNH[..., 1::2]) if interleaved else x_BTNH.chunk(2, dim=-1)
    turned = left * cos - right * sin, right * cos + left * sin
    out = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return out.type_as(x_BTNH)
