"""Cross-entropy of logits whose vocabulary is cut over ranks: the logits are never gathered.

Source: the vocabulary-parallel cross-entropy of Megatron-LM (arXiv 1909.08053, section 3): the ranks exchange each
token's maximum, then its sum of exponentials and the label's logit. Nothing is sent in the backward pass.

Shape suffixes: T tokens, C tokens of a chunk, W entries of the vocabulary on this rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from packhouse.client.pack import IGNORE
from packhouse.trainer.loss import CHUNK_TOKENS
from packhouse.trainer.parallel.collectives import all_reduce
from packhouse.trainer.parallel.groups import Group


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, divisor: int, group: Group) -> Tensor:
    """As `cross_entropy`, for logits (B, T, W) of which this rank holds the entries [rank * W, (rank + 1) * W).

    `labels` (B, T) are whole on every rank of `group`, and so is the result.
    """
    total: Tensor = _SummedLoss.apply(logits.flatten(0, 1), labels.flatten(), group)  # type: ignore[no-untyped-call]
    return total / max(divisor, 1)


class _SummedLoss(torch.autograd.Function):
    """The sum of the trained tokens' losses; widens the logits a chunk at a time, forward and backward."""

    @staticmethod
    def forward(ctx: Any, logits_TW: Tensor, labels_T: Tensor, group: Group) -> Tensor:
        wide = torch.promote_types(logits_TW.dtype, torch.float32)
        highest_T = all_reduce(logits_TW.amax(-1).to(wide), group, dist.ReduceOp.MAX)
        local_T = labels_T - group.rank * logits_TW.shape[1]
        local_T = local_T.where((local_T >= 0) & (local_T < logits_TW.shape[1]), -1)
        sums = [_sums(*chunk) for chunk in _chunks(logits_TW, local_T, highest_T)]
        exponentials_T, own_T = all_reduce(torch.cat(sums, dim=1), group)
        log_sum_T = exponentials_T.log() + highest_T
        ctx.save_for_backward(logits_TW, local_T, labels_T, log_sum_T)
        total: Tensor = (log_sum_T - own_T).masked_fill(labels_T == IGNORE, 0).sum()
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits_TW, local_T, labels_T, log_sum_T = ctx.saved_tensors
        d_logits_TW = torch.empty_like(logits_TW)
        chunks = _chunks(logits_TW, local_T, labels_T, log_sum_T, d_logits_TW)
        for logits_CW, local_C, labels_C, log_sum_C, d_logits_CW in chunks:
            probabilities_CW = (logits_CW.to(log_sum_C.dtype) - log_sum_C[:, None]).exp()
            rows = (local_C >= 0).to(probabilities_CW.dtype)
            probabilities_CW.scatter_add_(1, local_C.clamp(min=0)[:, None], -rows[:, None])
            weight_C = grads[0].to(probabilities_CW.dtype) * (labels_C != IGNORE)
            d_logits_CW.copy_(probabilities_CW * weight_C[:, None])
        return d_logits_TW, None, None


def _chunks(*tensors: Tensor) -> Any:
    return zip(*(torch.split(x, CHUNK_TOKENS) for x in tensors), strict=True)


def _sums(logits_CW: Tensor, local_C: Tensor, highest_C: Tensor) -> Tensor:
    """(2, C): this rank's part of the sum of exponentials, and the label's logit where it lies here, else 0."""
    wide_CW = logits_CW.to(highest_C.dtype)
    own_C = wide_CW.gather(1, local_C.clamp(min=0)[:, None])[:, 0].masked_fill(local_C < 0, 0)
    return torch.stack(((wide_CW - highest_C[:, None]).exp().sum(-1), own_C))
