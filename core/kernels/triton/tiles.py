"""What kernels that go over rows share: the tile of one program, and the dtype of its sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NUMBERS_PER_PROGRAM = 2048


def tile(width: int, numbers: int = NUMBERS_PER_PROGRAM) -> tuple[int, int]:
    """Rows and columns of a program's tile over rows of `width`: powers of two, `numbers` in all; the whole width where it fits."""
    wide = min(numbers // 2, triton.next_power_of_2(max(1, width)))
    return numbers // wide, wide


def sum_dtype(dtype: torch.dtype) -> tl.dtype:
    """The dtype of sums over values of `dtype`: float32, or float64 for float64."""
    return tl.float64 if dtype == torch.float64 else tl.float32
