"""Triton kernels for scales of whole tensors: the largest size in each matrix or each expert's rows, and the scale that follows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.kernels.casts import Cast
from core.kernels.triton.rounding import float32_scale, size_bits, widen

_HIGH, _WIDE = 8, 1024


class TensorScales(NamedTuple):
    """Factor and stored scale of each matrix or expert [N], float32; owner_R: the expert of each row, int32, where rows have one."""

    factor_N: Tensor
    stored_N: Tensor
    owner_R: Tensor | None


def of_matrices(x_BRC: Tensor, how: Cast, amax: Tensor | None) -> TensorScales | None:
    """The scales of whole matrices, None where the kind has none. amax: [B] or one for all, that stands for the measured one."""
    if not how.of_tensor:
        return None
    return TensorScales(*tensor_scales(largest_bits(x_BRC), amax, how), None)


def of_experts(x_RC: Tensor, counts_E: Tensor, how: Cast, amax_E: Tensor | None) -> TensorScales | None:
    """The scales of each expert's rows, and whose each row is; see `of_matrices`. The host does not wait for the counts."""
    if not how.of_tensor:
        return None
    rows = torch.arange(len(x_RC), device=x_RC.device)
    # A row past all counts, which there must not be, still finds an expert.
    owner_R = torch.searchsorted(counts_E.cumsum(0), rows, right=True, out_int32=True).clamp_(max=len(counts_E) - 1)
    measured = largest_bits(x_RC.unsqueeze(0), owner_R, len(counts_E))
    return TensorScales(*tensor_scales(measured, amax_E, how), owner_R)


def largest_bits(x_BRC: Tensor, owner_R: Tensor | None = None, owners: int = 0) -> Tensor:
    """The bits of the largest size in each matrix: [B] int32; or, where B is 1, in the rows of each owner: [owners].

    Sizes are compared as integers, so the largest does not depend on the order, and an infinity or NaN is above all numbers.
    owner_R: [R] int32, rising. Zero without elements.
    """
    count = x_BRC.shape[0] if owner_R is None else owners
    found = torch.zeros(count, dtype=torch.int32, device=x_BRC.device)
    if not x_BRC.numel():
        return found
    if owner_R is None and x_BRC.stride(2) != 1:
        x_BRC = x_BRC.transpose(1, 2)
    matrices, rows, columns = x_BRC.shape
    wide = min(_WIDE, max(16, triton.next_power_of_2(columns)))
    _largest[(triton.cdiv(rows, _HIGH), matrices)](
        x_BRC, owner_R, found, rows, columns, *x_BRC.stride(),
        GROUPED=owner_R is not None, HIGH=_HIGH, WIDE=wide, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return found


def tensor_scales(measured_N: Tensor, given: Tensor | None, cast: Cast) -> tuple[Tensor, Tensor]:
    """factor and stored scale of each tensor, [N] float32 both; NaN where what was measured (`largest_bits`) is not finite.

    given: [N] or one for all, float32: an amax that stands for the measured one.
    """
    factor, stored = (torch.empty(len(measured_N), dtype=torch.float32, device=measured_N.device) for _ in range(2))
    if len(measured_N):
        _scales[(triton.cdiv(len(measured_N), 128),)](
            measured_N, given, factor, stored, len(measured_N), 0 if given is None or given.numel() == 1 else 1,
            GIVEN=given is not None, LARGEST=cast.largest, MAX_EXPONENT=cast.max_exponent, BLOCK=128,
            enable_fp_fusion=False,
        )  # fmt: skip
    return factor, stored


@triton.jit
def _largest(
    x_ptr, owner_ptr, found_ptr, rows, columns, matrix_stride, row_stride, column_stride,
    GROUPED: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1).to(tl.int64)
    first_row = tl.program_id(0).to(tl.int64) * HIGH
    r = first_row + tl.arange(0, HIGH)
    best = tl.zeros([HIGH, WIDE], tl.int32)
    start = x_ptr + matrix * matrix_stride + r[:, None] * row_stride
    for first in range(0, columns, WIDE):
        c = (first + tl.arange(0, WIDE)).to(tl.int64)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        best = tl.maximum(best, size_bits(widen(tl.load(start + c[None, :] * column_stride, mask=inside, other=0))))
    of_row = tl.max(best, axis=1)
    if GROUPED:
        # Rows of one owner nearly always: one number then goes to it.
        last_row = tl.minimum(first_row + HIGH, rows) - 1
        owner = tl.load(owner_ptr + first_row)
        if owner == tl.load(owner_ptr + last_row):
            tl.atomic_max(found_ptr + owner, tl.max(of_row, axis=0))
        else:
            owners = tl.load(owner_ptr + r, mask=r < rows, other=0)
            tl.atomic_max(found_ptr + owners, of_row, mask=r < rows)
    else:
        tl.atomic_max(found_ptr + matrix, tl.max(of_row, axis=0))


@triton.jit
def _scales(
    measured_ptr, given_ptr, factor_ptr, stored_ptr, count, given_stride,
    GIVEN: tl.constexpr, LARGEST: tl.constexpr, MAX_EXPONENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(measured_ptr + n, mask=n < count, other=0)
    if GIVEN:
        given = tl.load(given_ptr + n * given_stride, mask=n < count, other=0)
        size = size_bits(given)
        size = tl.where((given < 0) & (size < 0x7F800000), 0, size)
        bits = tl.where(bits < 0x7F800000, size, bits)
    factor, stored = float32_scale(bits, LARGEST, MAX_EXPONENT, False)
    tl.store(factor_ptr + n, factor, mask=n < count)
    tl.store(stored_ptr + n, stored, mask=n < count)
