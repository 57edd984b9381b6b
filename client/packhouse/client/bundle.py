"""Bundle: any nest of tensors as one block of shared memory, since between processes each tensor costs a connection."""

import io
import pickle
from typing import Any, NamedTuple

import torch

ALIGNMENT = 64


class Bundle(NamedTuple):
    """A nest of lists, dictionaries and objects, its tensors put aside."""

    rest: bytes
    """The nest, pickled, with a number for each tensor."""
    places: list[tuple[int, torch.dtype, list[int]]]
    """Where each tensor begins in the block, its type and its shape."""
    block: torch.Tensor
    """uint8, in shared memory."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.block.nbytes + len(self.rest)


def bundle(value: Any) -> Bundle:
    """Return ``value`` as a bundle; what is no dense tensor on the CPU is pickled with the rest."""
    sink = io.BytesIO()
    pickler = _Pickler(sink, pickle.HIGHEST_PROTOCOL)
    pickler.dump(value)
    places, size = [], 0
    for tensor in pickler.tensors:
        places.append((size, tensor.dtype, list(tensor.shape)))
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    storage = torch.UntypedStorage._new_shared(max(1, size), device="cpu")  # type: ignore[no-untyped-call]
    block = torch.empty(0, dtype=torch.uint8).set_(storage)
    made = Bundle(sink.getvalue(), places, block)
    for tensor, view in zip(pickler.tensors, _tensors(made), strict=True):
        view.copy_(tensor)
    return made


def unbundle(given: Bundle) -> Any:
    """Return the value again; its tensors are views on the block."""
    unpickler = _Unpickler(io.BytesIO(given.rest))
    unpickler.tensors = _tensors(given)
    value: Any = unpickler.load()
    return value


def _tensors(given: Bundle) -> list[torch.Tensor]:
    tensors = []
    for begin, dtype, shape in given.places:
        size = torch.Size(shape)
        part = given.block[begin : begin + size.numel() * dtype.itemsize]
        tensors.append(part.view(dtype).view(size))
    return tensors


class _Pickler(pickle.Pickler):
    def __init__(self, sink: io.BytesIO, protocol: int) -> None:
        super().__init__(sink, protocol)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout is not torch.strided:
            return None
        self.tensors.append(value.detach())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    tensors: list[torch.Tensor]

    def persistent_load(self, number: Any) -> torch.Tensor:
        return self.tensors[int(number)]
