"""The norm of gradients that lie in several tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Elements whose squares are added in the gradients' own precision, in float32 if that is less.
_ROW = 4096
# Rows of 16-bit floats that are widened at once.
_ROWS = 256


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of squares of all elements, a float64 scalar.

    Torch adds up a float32 norm in float32: over tens of millions of elements that is a percent off, and by how much depends on
    how experts lie on ranks. Short rows are exact enough, and their sum is float64.
    """
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device if tensors else None)
    for tensor in tensors:
        flat = tensor.reshape(-1)
        full = flat.numel() // _ROW * _ROW
        for rows in (flat[:full].view(-1, _ROW), flat[None, full:]):
            total += _norms(rows).to(torch.float64).square().sum()
    return total


def _norms(rows: Tensor) -> Tensor:
    """The norm of every row, in float32 at least."""
    if rows.dtype.itemsize > 2:
        return torch.linalg.vector_norm(rows, dim=1)
    return torch.cat([torch.linalg.vector_norm(some, dim=1, dtype=torch.float32) for some in rows.split(_ROWS)])
