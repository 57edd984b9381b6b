"""Operations by the triangles of the real segments."""

import pytest
import torch

from packhouse.trainer.flops import peak_flops, step_flops
from packhouse.trainer.model import CONFIGS, InternLM2

TINY = CONFIGS["tiny"]


def borders(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def test_products_with_weights_are_six_per_parameter_and_token() -> None:
    """With segments of one token attention is small: two products over one pair each, in each layer."""
    model = InternLM2(TINY)
    products = sum(x.numel() for n, x in model.named_parameters() if x.ndim > 1 and "tok_embeddings" not in n)
    attention = 3 * TINY.num_layers * 2 * 2 * TINY.hidden_size * 10
    assert step_flops(TINY, [borders(*[1] * 10)]) == 6 * products * 10 + attention


def test_attention_follows_segments_and_not_the_pack() -> None:
    whole, short = step_flops(TINY, [borders(4096)]), step_flops(TINY, [borders(*[64] * 64)])
    pairs = 4096 * 4097 // 2 - 64 * (64 * 65 // 2)
    assert whole - short == 3 * 4 * TINY.num_layers * TINY.hidden_size * pairs
    assert step_flops(TINY, [borders(64)] * 64) == short


@pytest.mark.parametrize(("name", "peak"), [("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("Odd", None)])
def test_peaks_are_known_by_name(monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0)) == peak
    assert peak_flops(torch.device("cpu")) is None
