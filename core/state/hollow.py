"""Parameters that keep shape, dtype and identity, and whose values lie elsewhere in another form."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def empty(tensor: Tensor) -> Tensor:
    """One NaN that stands for every element of a tensor like this one: it takes no memory, and whoever reads it by mistake sees it."""
    return torch.full((1,), math.nan, dtype=tensor.dtype, device=tensor.device).as_strided(
        tensor.shape, (0,) * tensor.dim()
    )


def is_hollow(tensor: Tensor) -> bool:
    """Whether this is what `empty` makes."""
    return tensor.dim() > 0 and not any(tensor.stride())
