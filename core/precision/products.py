"""Products of quantised operands, rows times rows, by several back ends of one definition.

reference: the numbers that codes and scales mean, multiplied in float32 (float64 for float64 results). It runs anywhere.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from core.kernels.backend import wide_dtype
from core.precision.formats import Quantised
from core.precision.grouped import Grouped


class ProductsBackend(Protocol):
    """The products of layers; operands are quantised along the dimension S that is summed over, which is last."""

    def product(self, a_MS: Quantised, b_NS: Quantised, dtype: torch.dtype) -> Tensor:
        """a @ b.T: [M, N] in `dtype`, accumulated in float32 at least."""
        ...

    def of_rows(self, a_RS: Grouped, b_ENS: Quantised, dtype: torch.dtype) -> Tensor:
        """Every row times the matrix of its expert: [R, N]."""
        ...

    def of_weights(self, a_NR: Grouped, b_KR: Grouped, dtype: torch.dtype) -> Tensor:
        """For each expert the product over its own rows: [E, N, K]; zeros for one without rows."""
        ...


class Reference:
    """The definition: dequantised products, expert by expert."""

    def product(self, a_MS: Quantised, b_NS: Quantised, dtype: torch.dtype) -> Tensor:
        """See ProductsBackend."""
        wide = wide_dtype(dtype)
        return (a_MS.dequantise(wide) @ b_NS.dequantise(wide).mT).to(dtype)

    def of_rows(self, a_RS: Grouped, b_ENS: Quantised, dtype: torch.dtype) -> Tensor:
        """See ProductsBackend."""
        wide = wide_dtype(dtype)
        rows, matrices = a_RS.dequantise(wide), b_ENS.dequantise(wide)
        out = torch.empty(rows.shape[0], matrices.shape[1], dtype=dtype, device=rows.device)
        if out.device.type == "meta":  # of a plan, where nobody knows the counts
            return out
        counts = a_RS.counts_E.tolist()
        for x, matrix, y in zip(rows.split(counts), matrices, out.split(counts), strict=True):
            y.copy_(x @ matrix.mT)
        return out

    def of_weights(self, a_NR: Grouped, b_KR: Grouped, dtype: torch.dtype) -> Tensor:
        """See ProductsBackend."""
        wide = wide_dtype(dtype)
        left, right = a_NR.dequantise(wide), b_KR.dequantise(wide)
        out = torch.empty(len(a_NR.counts_E), left.shape[0], right.shape[0], dtype=dtype, device=left.device)
        if out.device.type == "meta":
            return out
        counts = a_NR.counts_E.tolist()
        for x, z, y in zip(left.split(counts, 1), right.split(counts, 1), out, strict=True):
            y.copy_(x @ z.mT)
        return out
