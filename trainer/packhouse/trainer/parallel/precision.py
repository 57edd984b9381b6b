"""The dtype in which a linear computes: autocast's where it is on, so that what is sent is narrowed first."""

from collections.abc import Callable

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype for the device of `x` while autocast is on, else the dtype of `x`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def narrowed(operation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`operation` on its argument in the dtype in which a linear will compute with it."""
    return lambda x: operation(x.to(compute_dtype(x)))
