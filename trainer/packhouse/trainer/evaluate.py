"""The loss on held-out steps: the mean over all their trained tokens, whatever the ranks and the cut into steps."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from packhouse.trainer.loss import count_trained_tokens
from packhouse.trainer.parallel.collectives import all_reduce
from packhouse.trainer.parallel.sharded import ShardedModel
from packhouse.trainer.step import micro_batches, micro_loss


@torch.no_grad()
def evaluate(sharded: ShardedModel, batches: Iterable[Sequence[Any]], *, bf16: bool = False) -> float:
    """Mean loss over the trained tokens of `batches`, 0 where there is none; weights and gradients stay. Collective.

    The batches are those of this data rank, equally many on every rank, as `train` takes them.
    """
    device = next(sharded.model.parameters()).device
    total, trained = torch.zeros((), dtype=torch.float64, device=device), 0
    training = sharded.model.training
    sharded.model.eval()
    for data, labels in batches:
        trained += count_trained_tokens(labels)
        for pack, targets in micro_batches(data, labels, device):
            total += micro_loss(sharded, pack, targets, 1, bf16=bf16)
    sharded.model.train(training)
    counted = all_reduce(torch.tensor(trained, device=device), sharded.groups.data)
    return float(all_reduce(total, sharded.mode.sum_loss)) / max(int(counted), 1)
