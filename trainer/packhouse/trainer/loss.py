"""Cross-entropy in which every trained token of a step weighs the same, however the step is cut into micro-batches.

A micro-batch's loss is a sum over its own trained tokens divided by the trained tokens of the whole step: adding up the
micro-batches gives the mean over the step, and a micro-batch weighs what it has to teach. A mean per micro-batch would
weigh a pack with ten trained tokens like one with ten thousand, and is 0/0 for a pack with none.

Shape suffixes: B rows, T tokens of the pack, C tokens of a chunk, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from packhouse.client.pack import IGNORE

CHUNK_TOKENS = 1024


def count_trained_tokens(labels: Tensor) -> int:
    """How many of the labels, of any shape, are trained."""
    return int((labels != IGNORE).sum())


def cross_entropy(logits_BTV: Tensor, labels_BT: Tensor, divisor: int) -> Tensor:
    """The micro-batch's part of the step's loss: a scalar, float32 (float64 for float64 logits).

    `logits_BTV` (B, T, V); `labels_BT` (B, T) int64, already the next token, -100 where not trained; `divisor`, for the
    mean over the step, is the count of trained tokens over all its micro-batches. Without a trained token the loss is 0
    and so is every gradient. Logits are widened to float32 a chunk of tokens at a time, and again in the backward pass
    rather than kept: with a large vocabulary a widened copy of them all would be the largest tensor of the run.
    """
    logits_TV, labels_T = logits_BTV.flatten(0, 1), labels_BT.flatten()
    chunks = zip(*(torch.split(x, CHUNK_TOKENS) for x in (logits_TV, labels_T)), strict=True)
    sums = [checkpoint(_summed, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return torch.stack(sums).sum() / max(divisor, 1)


def _summed(logits_CV: Tensor, labels_C: Tensor) -> Tensor:
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    return F.cross_entropy(logits_CV.to(wide), labels_C, ignore_index=IGNORE, reduction="sum")
