"""A model cut over ranks: what a mode consists of, and what the training loop must know of it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from packhouse.client.layouts import split_data_sequence_parallel
from packhouse.trainer.loss import cross_entropy
from packhouse.trainer.model import InternLM2
from packhouse.trainer.parallel.groups import Group, Groups
from packhouse.trainer.parallel.shard import Edges, Placement, Undo, exchanged
from packhouse.trainer.parallel.vocab_loss import vocab_parallel_cross_entropy

Loss = Callable[[Tensor, Tensor, int], Tensor]
"""(logits, labels, divisor) to this rank's part of the loss; see `packhouse.trainer.loss.cross_entropy`."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a mode may be asked for.

    `parallel_output` leaves the logits where they are computed, else they are gathered on every rank; `overlap` sends
    the next layer's weights while this one computes, in the mode that sends weights; `recompute_layers` is how many
    layers, from the first, keep their input only and compute again in the backward pass.
    """

    parallel_output: bool = True
    overlap: bool = True
    recompute_layers: int = 0


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to cut a model."""

    edges: Edges
    whole_edges: Edges
    """The same cuts of the weights, for whole sequences on every rank and gathered logits: for generation."""
    shard: Group
    """The ranks over which a weight is cut."""
    sum_cut: Group
    """The ranks over whose gradients those of a cut weight add up after the backward pass."""
    sum_whole: Group
    """The same for a parameter that every rank holds whole."""
    loss: Loss
    sum_loss: Group
    """The ranks whose parts of the loss add up; the other ranks hold the same part."""
    cut_sequence: bool = False
    """Whether activations, or already the data, are cut along the sequence over the tensor group."""
    cut_data: bool = False
    cut_labels: bool = False


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """A model whose weights are this rank's parts, the groups that it works in, and where each parameter lies."""

    model: InternLM2
    groups: Groups
    mode: Mode
    placements: dict[str, Placement]
    attached: list[Undo] = field(repr=False)

    def own_data(self, data: dict[str, Any], labels: Tensor) -> tuple[dict[str, Any], Tensor]:
        """This rank's part of a normalized micro-batch; raises ValueError for a length that cannot be cut equally."""
        if not self.mode.cut_data:
            return data, labels
        tensor = self.groups.tensor
        own, own_labels = split_data_sequence_parallel(data, labels, tensor.rank, tensor.size)
        return own, own_labels if self.mode.cut_labels else labels

    def whole_sequences(self) -> AbstractContextManager[None]:
        """While this is entered, the model takes whole sequences and gives whole logits on every rank."""
        return exchanged(self.model, self.attached, self.mode.edges, self.mode.whole_edges)


def tensor_loss(groups: Groups, parallel_output: bool) -> Loss:
    """The loss of logits whose vocabulary is cut over the tensor group, or of whole ones."""
    if parallel_output and groups.tensor.size > 1:
        return partial(vocab_parallel_cross_entropy, group=groups.tensor)
    return cross_entropy


def check_heads(mode: str, size: int, heads: int, kv_heads: int) -> None:
    """Raise ValueError unless each rank of a tensor group gets whole groups of heads."""
    if kv_heads % size or heads % size:
        raise ValueError(
            f"{mode} cannot cut {heads} query and {kv_heads} key/value heads over tp {size}: "
            f"use a tp that divides {kv_heads}, or isp"
        )
