"""How many floating-point operations a step's packs are worth, and what share of a device's peak they reached.

Attention is counted by the triangles of the real segments, never by pack length squared, and a recomputed forward pass
is not counted: what is reported is model FLOPs utilization (MFU; source: PaLM, arXiv 2204.02311, appendix B).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from packhouse.trainer.model import ModelConfig

PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "H800": 989.0, "A100": 312.0, "A800": 312.0, "L40S": 362.0}
"""Dense 16-bit peaks by a part of the device's name, from the vendors' data sheets."""


def step_flops(config: ModelConfig, cu_seqlens: Sequence[Tensor]) -> float:
    """Operations of one forward and backward pass over packs with these segment borders, padding tails included.

    A matrix product counts 2 per multiply-add, backward twice the forward. A layer's attention takes two products over
    n (n + 1) / 2 pairs of each segment of n tokens, each over the hidden size.
    """
    tokens = sum(int(borders[-1]) for borders in cu_seqlens)
    pairs = sum(int((n * (n + 1) // 2).sum()) for n in (borders.diff().to(torch.int64) for borders in cu_seqlens))
    hidden, kv = config.hidden_size, config.num_kv_heads * config.head_dim
    layer = hidden * (2 * hidden + 2 * kv) + 3 * hidden * config.ffn_size
    weights = config.num_layers * layer + hidden * config.vocab_size
    forward = 2.0 * weights * tokens + 2.0 * 2.0 * config.num_layers * hidden * pairs
    return 3.0 * forward


def peak_flops(device: torch.device) -> float | None:
    """The device's dense 16-bit peak in operations per second, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * 1e12 for part, peak in PEAK_TFLOPS.items() if part in name), None)
