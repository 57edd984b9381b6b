"""The loss: one weight per trained token of the step, and no widened copy of the logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from packhouse.trainer.loss import count_trained_tokens, cross_entropy


def random_logits(tokens: int, vocab_size: int = 11, dtype: torch.dtype = torch.float64) -> Tensor:
    logits = torch.randn(1, tokens, vocab_size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return logits.to(dtype).requires_grad_()


@pytest.mark.parametrize("trained", [[8, 8], [8, 1], [1, 0, 7, 3], [0, 8]])
def test_unequal_micro_batches_weigh_as_one_large_batch(trained: list[int]) -> None:
    logits = random_logits(8 * len(trained))
    labels = torch.arange(8 * len(trained))[None] % 11
    for row, count in enumerate(trained):
        labels[0, 8 * row + count : 8 * (row + 1)] = -100
    parts = zip(torch.split(logits, 8, dim=1), torch.split(labels, 8, dim=1), strict=True)
    loss = torch.stack([cross_entropy(*part, count_trained_tokens(labels)) for part in parts]).sum()
    expected = F.cross_entropy(logits[0], labels[0], ignore_index=-100)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(value, logits)[0] for value in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_a_pack_without_trained_tokens_gives_zero_and_zero_gradients() -> None:
    logits = random_logits(6)
    loss = cross_entropy(logits, torch.full((1, 6), -100), 0)
    torch.autograd.backward(loss)
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize("tokens", [1, 1024, 1025, 2500])
def test_chunks_leave_no_seam(tokens: int) -> None:
    logits, labels = random_logits(tokens), torch.arange(tokens)[None] % 11
    torch.testing.assert_close(cross_entropy(logits, labels, tokens), F.cross_entropy(logits[0], labels[0]))


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits, labels = random_logits(3000, dtype=torch.bfloat16), torch.arange(3000)[None] % 11
    loss = cross_entropy(logits, labels, 3000)
    torch.autograd.backward(loss)
    torch.testing.assert_close(loss, F.cross_entropy(logits[0].float(), labels[0]), rtol=1e-6, atol=0)
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_no_float32_tensor_is_larger_than_a_chunk(largest_tensor: Any) -> None:
    logits, labels = random_logits(4096, 50, torch.bfloat16), torch.zeros(1, 4096, dtype=torch.int64)
    with largest_tensor:
        torch.autograd.backward(cross_entropy(logits, labels, 4096))
    assert largest_tensor.numel[torch.float32] == 1024 * 50
