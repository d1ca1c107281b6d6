"""How numbers are rounded to a low-precision format, in words that kernels know; core/precision/formats.py says its formats in them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["tensor", "float32", "mx", "nvfp4"]


@dataclass(frozen=True, kw_only=True)
class Cast:
    """kind: what a scale is. tensor: float32 of all of a matrix, or of an expert's rows; float32, mx, nvfp4: of each block.

    element: e4m3, e5m2 or e2m1. largest: number that the largest of a block is mapped to, of tensor and float32; what the tensor's is
    mapped to, of nvfp4. block: rows and columns, powers of two; none where a scale is of the tensor. exact: whether scales are
    powers of two that saturate nothing, of float32 and mx.
    """

    kind: Kind
    element: str
    largest: float
    block: tuple[int, int] = (1, 1)
    exact: bool = False

    @property
    def symmetric(self) -> bool:
        """Whether a matrix and its transpose have the same scales."""
        return self.block[0] == self.block[1]

    @property
    def of_tensor(self) -> bool:
        """Whether a whole matrix, or the rows of an expert, have a scale."""
        return self.kind in ("tensor", "nvfp4")

    @property
    def max_exponent(self) -> int:
        """floor(log2(largest))."""
        return math.frexp(self.largest)[1] - 1

    @property
    def packed(self) -> bool:
        """Whether a byte holds two codes."""
        return self.element == "e2m1"
