"""InternLM2 for one process: a plain decoder that knows its arguments and nothing of parallelism.

Parameter names and shapes are those of the public checkpoints, so their state dicts load as they are. Modules read the
number of heads from the width of what their linears return, not from the configuration, so that a shard of the weights
computes a shard of the heads with this same code.

Shape suffixes: B rows (1 for a pack; several for unpacked samples, one a row), T tokens of a row, D hidden, N query
heads, K key/value heads, H numbers per head, V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packhouse.trainer.attention import CachedAttention, LayerCache, VarlenAttention
from packhouse.trainer.rotary import RotaryEmbedding, rotate, segment_lengths


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of an InternLM2; raises ValueError for one whose heads do not divide.

    `rope_interleaved` pairs neighbouring numbers of a head instead of its halves. With `rope_factor` positions are
    scaled dynamically in segments longer than `max_position` tokens.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    vocab_size: int = 92544
    rope_base: float = 1e6
    norm_eps: float = 1e-5
    rope_interleaved: bool = False
    rope_factor: float | None = None
    max_position: int = 32768

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} does not give {self.num_heads} heads of even width: "
                f"make it a multiple of {2 * self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}: change one of them"
            )
        if self.rope_factor is not None and self.rope_factor < 1:
            raise ValueError(f"rope_factor {self.rope_factor} would shrink positions: use at least 1, or leave it out")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def q_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads


CONFIGS = {
    "tiny": ModelConfig(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=128, vocab_size=512),
    "1.8b": ModelConfig(hidden_size=2048, num_layers=24, num_heads=16, num_kv_heads=8, ffn_size=8192),
    "7b": ModelConfig(hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_size=14336),
    "20b": ModelConfig(hidden_size=6144, num_layers=48, num_heads=48, num_kv_heads=8, ffn_size=16384),
}


class InternLM2(nn.Module):
    """The whole language model: decoder and untied output head.

    Weights follow from `seed` alone, whatever device and dtype they are kept in; on the meta device none are drawn.
    """

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.init_weights(seed)

    def forward(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        indexes: Tensor,
        max_seqlen: int,
        caches: Sequence[LayerCache] | None = None,
    ) -> Tensor:
        """Logits (B, T, V), in the dtype of the weights, for one pack, or for B rows of unpacked samples.

        `input_ids` (B, T) int64; `cu_seqlens` (n+1,) int32, the segment borders from 0 to B * T; `indexes` (T,) int64,
        each token's position in its segment, the same in all rows; `max_seqlen`, the length of the longest segment.
        With `caches`, one per layer, the tokens go on behind those that the caches hold; `cu_seqlens` is then [0, the
        length to be reached], which only scaled positions look at.
        Raises ValueError for borders that do not span the tokens.
        """
        logits_BTV: Tensor = self.output(self.model(input_ids, cu_seqlens, indexes, max_seqlen, caches))
        return logits_BTV

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set the weights to those of `seed`; see `initial_weights`."""
        parameters = dict(self.named_parameters())
        if not any(parameter.is_meta for parameter in parameters.values()):
            for name, weight in initial_weights(self, seed):
                parameters[name].copy_(weight)


def initial_weights(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each parameter of a whole `model`, float32 on the CPU, so the same wherever they end up.

    Normal of deviation 0.02; those that write into the residual stream are scaled by 1 / sqrt(2 * layers), which keeps
    the stream's variance independent of the depth, as in GPT-2. One is alive at a time.
    """
    generator = torch.Generator().manual_seed(seed)
    layers = sum(name.endswith("wo.weight") for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            yield name, torch.ones(parameter.shape)
            continue
        std = 0.02 / math.sqrt(2 * layers) if name.endswith(("wo.weight", "w2.weight")) else 0.02
        yield name, torch.randn(parameter.shape, generator=generator, device="cpu", dtype=torch.float32) * std


class Decoder(nn.Module):
    """Embedding, blocks and final norm: token ids to hidden states."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = RotaryEmbedding(config.head_dim, config.rope_base, config.rope_factor, config.max_position)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)

    def forward(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        indexes: Tensor,
        max_seqlen: int,
        caches: Sequence[LayerCache] | None = None,
    ) -> Tensor:
        """Hidden states (B, T, D); arguments as in `InternLM2.forward`."""
        # Counting lengths makes a GPU wait, so it is done only where positions are scaled by them.
        lengths = None
        if self.rotary_emb.scaling_factor is not None:
            lengths = cu_seqlens[-1:] if caches else segment_lengths(cu_seqlens, input_ids.shape[0])
        rotary = self.rotary_emb(indexes, lengths)
        x_BTD: Tensor = self.tok_embeddings(input_ids)
        for number, block in enumerate(self.layers):
            x_BTD = block(x_BTD, rotary, cu_seqlens, max_seqlen, caches[number] if caches else None)
        normed_BTD: Tensor = self.norm(x_BTD)
        return normed_BTD


class Block(nn.Module):
    """Attention and feed-forward, each added to the stream that it reads through a norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        # torch's own norm computes the variance of 16-bit inputs in fp32, as the public model does.
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)

    def forward(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        cu_seqlens: Tensor,
        max_seqlen: int,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """(B, T, D) to (B, T, D); `rotary` from `rotary_tables`."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotary, cu_seqlens, max_seqlen, cache)
        out_BTD: Tensor = x_BTD + self.feed_forward(self.ffn_norm(x_BTD))
        return out_BTD


class Attention(nn.Module):
    """Grouped-query attention with one fused weight for queries, keys and values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.q_per_kv = config.q_per_kv
        self.head_dim = config.head_dim
        self.interleaved = config.rope_interleaved
        qkv_size = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.wqkv = nn.Linear(config.hidden_size, qkv_size, bias=False)
        self.inner_attn = VarlenAttention()
        self.inner_cross_attn = CachedAttention()
        self.wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        cu_seqlens: Tensor,
        max_seqlen: int,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        q_BTNH, k_BTKH, v_BTKH = split_qkv(self.wqkv(x_BTD), self.q_per_kv, self.head_dim)
        q_BTNH, k_BTKH = (rotate(x, *rotary, interleaved=self.interleaved) for x in (q_BTNH, k_BTKH))
        if cache is None:
            context_BTNH = self.inner_attn(q_BTNH, k_BTKH, v_BTKH, cu_seqlens, max_seqlen)
        else:
            context_BTNH = self.inner_cross_attn(q_BTNH, k_BTKH, v_BTKH, cache)
        out_BTD: Tensor = self.wo(context_BTNH.flatten(-2))
        return out_BTD


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.w2 = nn.Linear(config.ffn_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.ffn_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        out_BTD: Tensor = self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))
        return out_BTD


def split_qkv(qkv: Tensor, q_per_kv: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Take (..., K * (q_per_kv + 2) * H) apart into queries (..., N, H), keys and values (..., K, H).

    The fused rows are stored per key/value head: its `q_per_kv` query heads, then its key, then its value.
    """
    groups = torch.unflatten(qkv, -1, (-1, q_per_kv + 2, head_dim))
    return groups[..., :-2, :].flatten(-3, -2), groups[..., -2, :], groups[..., -1, :]
