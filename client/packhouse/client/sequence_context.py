"""SequenceContext: what an XTuner model is given of one packed row, with its cuts over sequence-parallel ranks."""

from collections.abc import Sequence
from copy import copy
from typing import Any, Protocol, Self

import torch
from torch import Tensor

PAD_CHUNK = 256
"""Longest segment of padding: attention over one long segment would cost more than it needs to."""


class Mesh(Protocol):
    """What is needed of torch's one-dimensional ``DeviceMesh``."""

    def size(self) -> int:
        """Number of ranks."""

    def get_local_rank(self) -> int:
        """This rank's place."""


class SequenceContext:
    """One packed row of S tokens. Padding lies behind all tokens, in segments of its own of at most 256.

    ``input_ids`` int64 (1, S). ``cu_seq_lens_q``, ``cu_seq_lens_k`` int32 (segments + 1,), from 0 to the length of the
    whole row, also where this is a part of it. ``max_length_q``, ``max_length_k`` int32 () on the CPU, so that reading
    them waits for no device: the longest segment, padding counted. ``position_ids`` int64 (1, S), from 0 in every
    segment unless given. ``num_padding``: padding tokens of this part. Each method returns a new context; a subclass's
    own fields are copied as they are.
    """

    def __init__(
        self,
        input_ids: Tensor,
        cu_seq_lens_q: Tensor,
        cu_seq_lens_k: Tensor,
        max_length_q: Tensor | int,
        max_length_k: Tensor | int,
        num_padding: int = 0,
        position_ids: Tensor | None = None,
        sequence_parallel_mesh: Mesh | None = None,
        padding: Tensor | None = None,
    ) -> None:
        self.input_ids = input_ids
        self.cu_seq_lens_q = cu_seq_lens_q
        self.cu_seq_lens_k = cu_seq_lens_k
        self.max_length_q = torch.as_tensor(max_length_q, dtype=torch.int32)
        self.max_length_k = torch.as_tensor(max_length_k, dtype=torch.int32)
        self.num_padding = num_padding
        self.position_ids = _positions(cu_seq_lens_q)[None] if position_ids is None else position_ids
        self.sequence_parallel_mesh = sequence_parallel_mesh
        size = input_ids.shape[1]
        places = torch.arange(size, device=input_ids.device)[None]
        self.padding = places >= size - num_padding if padding is None else padding
        """bool (1, S), true on padding. After ``cat`` it is in several places, so a count would not do."""

    @classmethod
    def from_row(cls, input_ids: Tensor, ends: Sequence[int], num_padding: int = 0) -> Self:
        """Return the context of a row of tokens (S,) whose segments end at ``ends``, padding segments included."""
        cu_seqlens = torch.tensor([0, *ends], dtype=torch.int32)
        longest = cu_seqlens.diff().max()
        return cls(input_ids[None], cu_seqlens, cu_seqlens, longest, longest, num_padding)

    @property
    def data(self) -> dict[str, Any]:
        """The arguments that make this context again, for subclasses: ``Mine(**context.data, more=...)``."""
        names = ("input_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "num_padding")
        return {name: getattr(self, name) for name in (*names, "position_ids", "sequence_parallel_mesh", "padding")}

    @property
    def mask(self) -> Tensor:
        """bool (1, S), true where there is a token."""
        return ~self.padding

    @property
    def seq_lens_q(self) -> Tensor:
        """int32 (segments,), the length of each segment."""
        return self.cu_seq_lens_q.diff()

    @property
    def device(self) -> torch.device:
        """Where the tokens are."""
        return self.input_ids.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return the context on a device; the greatest lengths stay on the CPU."""
        names = ("input_ids", "cu_seq_lens_q", "cu_seq_lens_k", "position_ids", "padding")
        return self._with(**{name: getattr(self, name).to(device, non_blocking=non_blocking) for name in names})

    def pin_memory(self) -> Self:
        """Return the context in pinned memory: a DataLoader calls this under ``pin_memory``."""
        names = ("input_ids", "cu_seq_lens_q", "cu_seq_lens_k", "position_ids", "padding")
        return self._with(**{name: getattr(self, name).pin_memory() for name in names})

    def pad(self, count: int, pad_id: int = 0) -> Self:
        """Return the context with ``count`` padding tokens more, in segments of their own."""
        if count == 0:
            return self
        start = int(self.cu_seq_lens_q[-1])
        more = torch.tensor(pad_ends(start, start + count), dtype=torch.int32, device=self.device)
        positions = torch.arange(count, device=self.device) % PAD_CHUNK
        longest = min(count, PAD_CHUNK)
        return self._with(
            input_ids=torch.cat([self.input_ids, self.input_ids.new_full((1, count), pad_id)], 1),
            cu_seq_lens_q=torch.cat([self.cu_seq_lens_q, more]),
            cu_seq_lens_k=torch.cat([self.cu_seq_lens_k, more]),
            max_length_q=self.max_length_q.clamp(min=longest),
            max_length_k=self.max_length_k.clamp(min=longest),
            num_padding=self.num_padding + count,
            position_ids=torch.cat([self.position_ids, positions[None]], 1),
            padding=torch.cat([self.padding, self.padding.new_ones(1, count)], 1),
        )

    def split(self, sequence_parallel_mesh: Mesh | None = None) -> Self:
        """Return this rank's equal part of the row, which is padded first where the ranks do not divide it.

        Ids, positions and padding are cut; borders and greatest lengths stay those of the whole row.
        """
        mesh = sequence_parallel_mesh
        if mesh is None or mesh.size() == 1:
            return self._with(sequence_parallel_mesh=mesh)
        whole = self.pad(-self.input_ids.shape[1] % mesh.size())
        padding = _part(whole.padding, mesh)
        return whole._with(
            input_ids=_part(whole.input_ids, mesh),
            position_ids=_part(whole.position_ids, mesh),
            padding=padding,
            num_padding=int(padding.sum()),
            sequence_parallel_mesh=mesh,
        )

    @classmethod
    def cat(cls, sequence_context_list: Sequence[Self]) -> Self:
        """Return the contexts end to end as one, with the mesh and further fields of the first."""
        rows = sequence_context_list
        borders = {}
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            parts, shift = [getattr(rows[0], name)[:1]], 0
            for row in rows:
                parts.append(getattr(row, name)[1:] + shift)
                shift += int(getattr(row, name)[-1])
            borders[name] = torch.cat(parts)
        return rows[0]._with(
            **borders,
            **{name: torch.cat([getattr(row, name) for row in rows], 1) for name in ("input_ids", "position_ids")},
            padding=torch.cat([row.padding for row in rows], 1),
            num_padding=sum(row.num_padding for row in rows),
            max_length_q=torch.stack([row.max_length_q for row in rows]).max(),
            max_length_k=torch.stack([row.max_length_k for row in rows]).max(),
        )

    def _with(self, **changes: Any) -> Self:
        # Not by the constructor: a subclass's may take more arguments.
        changed = copy(self)
        for name, value in changes.items():
            setattr(changed, name, value)
        return changed


def split_labels(labels: Tensor, mesh: Mesh, ignore: int = -100) -> Tensor:
    """Return this rank's part of the labels (1, S), cut as ``SequenceContext.split`` cuts the row."""
    extra = -labels.shape[1] % mesh.size()
    return _part(torch.nn.functional.pad(labels, (0, extra), value=ignore), mesh)


def pad_ends(start: int, stop: int) -> list[int]:
    """Return where the segments of a padding tail end."""
    return [*range(start + PAD_CHUNK, stop, PAD_CHUNK), stop] if start < stop else []


def _part(tensor: Tensor, mesh: Mesh) -> Tensor:
    return tensor.chunk(mesh.size(), 1)[mesh.get_local_rank()]


def _positions(cu_seqlens: Tensor) -> Tensor:
    starts = cu_seqlens[:-1].long()
    return torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device) - starts.repeat_interleave(cu_seqlens.diff())
