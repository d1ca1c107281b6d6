"""Triton kernels that rotate groups of 16 by a random Hadamard matrix and write only what comes of it (report section 5.3.4).

core/precision/rotated.py has the definition, whose bits these give: additions run in the order of its butterflies. Operands are x of
R rows whose groups lie along S, in memory either [R, S] (`along` 1) or [S, R] (`along` 0), as the weight gradient reads rows.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.kernels.triton.rounding import encode, float32_scale, nvfp4_scale, pack, scaled, size_bits, widen
from core.kernels.triton.tiles import tile

Along = Literal[0, 1]
POINTS = 16
# Rows and numbers along S of a program's tile, where memory runs along the rows: whole sectors are read and written.
_TURNED = (64, 64)


def largest_of_lines(x: Tensor, signs: Tensor, *, along: Along) -> Tensor:
    """The largest size in each line of the rotated x: of rows [R] where `along` is 1, of groups [S / 16] where it is 0; float32.

    NaN where a line is not a number. x: two dimensions of float32 or narrower, that of the groups a multiple of 16; signs: [16].
    """
    rows, summed = _sizes(x, along)
    lines = torch.zeros(rows if along == 1 else summed // POINTS, dtype=torch.int32, device=x.device)
    if x.numel():
        high, wide = _tile(summed, along)
        _largest[(triton.cdiv(rows, high), triton.cdiv(summed, wide))](
            x, signs.to(x.device), lines, rows, summed, x.stride(1 - along), x.stride(along),
            BY_ROW=along == 1, HIGH=high, WIDE=wide, num_warps=_warps(along), enable_fp_fusion=False,
        )  # fmt: skip
    return lines.view(torch.float32)


def quantise_lines(
    x: Tensor, signs: Tensor, amax: Tensor, *, along: Along, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The rotated x in NVFP4 of blocks of 16 along S: two codes to a byte [R, S / 2], and E4M3 scales [R, S / 16], uint8 both.

    amax: float32, of everything in one element, or of each line; see `largest_of_lines`. noise: [R, S] in any strides; rounds to the
    nearest without. Raises ValueError for other shapes.
    """
    rows, summed = _sizes(x, along)
    if noise is not None and noise.shape != (rows, summed):
        raise ValueError(f"noise of shape {tuple(noise.shape)} for numbers of shape {(rows, summed)}")
    lines = rows if along == 1 else summed // POINTS
    if amax.numel() not in (1, lines):
        raise ValueError(f"an amax of shape {tuple(amax.shape)} for {lines} lines")
    codes = torch.empty(rows, summed // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, summed // POINTS, dtype=torch.uint8, device=x.device)
    if x.numel():
        high, wide = _tile(summed, along)
        each = 0 if amax.numel() == 1 else 1
        _quantise[(triton.cdiv(rows, high), triton.cdiv(summed, wide))](
            x, signs.to(x.device), amax.contiguous(), noise, codes, scales, rows, summed, x.stride(1 - along), x.stride(along),
            each if along == 1 else 0, each if along == 0 else 0, *(noise.stride() if noise is not None else (0, 0)),
            STOCHASTIC=noise is not None, HIGH=high, WIDE=wide, num_warps=_warps(along), enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scales


def rotate_lines(x: Tensor, signs: Tensor, *, along: Along) -> Tensor:
    """The rotated x itself: [R, S] float32."""
    rows, summed = _sizes(x, along)
    out = torch.empty(rows, summed, dtype=torch.float32, device=x.device)
    if x.numel():
        high, wide = _tile(summed, along)
        _rotate[(triton.cdiv(rows, high), triton.cdiv(summed, wide))](
            x, signs.to(x.device), out, rows, summed, x.stride(1 - along), x.stride(along), HIGH=high, WIDE=wide,
            num_warps=_warps(along), enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _sizes(x: Tensor, along: Along) -> tuple[int, int]:
    """R and S. Raises ValueError where a group would not be whole."""
    rows, summed = x.shape[1 - along], x.shape[along]
    if summed % POINTS:
        raise ValueError(f"a Hadamard transform of {POINTS} points needs a dimension that {POINTS} divides: {summed}")
    return rows, summed


def _tile(summed: int, along: Along) -> tuple[int, int]:
    """Rows of a program's tile, and numbers along S, whole groups."""
    if along == 0:
        return _TURNED
    high, wide = tile(max(POINTS, summed))
    return high, wide


def _warps(along: Along) -> int:
    return 8 if along == 0 else 4


@triton.jit
def rotate(x, signs, GROUPS: tl.constexpr):
    """Groups [GROUPS, 16] in float32 times diag(signs) · H / 4: four butterflies, of neighbours first."""
    x = tl.reshape(x * signs[None, :], [GROUPS, 2, 2, 2, 2])
    for _ in tl.static_range(4):
        # The last bit of a point's number makes way for the next one; after four turns all are where they were.
        first, second = tl.split(x)
        x = tl.permute(tl.join(first + second, first - second), (0, 4, 1, 2, 3))
    return tl.reshape(x, [GROUPS, 16]) * 0.25


@triton.jit
def rotated_tile(
    x_ptr, signs_ptr, r, s, rows, summed, row_stride, summed_stride, HIGH: tl.constexpr, WIDE: tl.constexpr
):
    """The rotated groups of a tile [HIGH, WIDE] as [HIGH * WIDE / 16, 16] float32; zeros where nothing is."""
    inside = (r < rows)[:, None] & (s < summed)[None, :]
    x = tl.load(x_ptr + r[:, None] * row_stride + s[None, :] * summed_stride, mask=inside, other=0)
    signs = tl.load(signs_ptr + tl.arange(0, 16))
    return rotate(tl.reshape(widen(x), [HIGH * WIDE // 16, 16]), signs, HIGH * WIDE // 16)


@triton.jit
def _largest(
    x_ptr, signs_ptr, line_ptr, rows, summed, row_stride, summed_stride,
    BY_ROW: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * HIGH + tl.arange(0, HIGH)
    s = tl.program_id(1).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    y = rotated_tile(x_ptr, signs_ptr, r, s, rows, summed, row_stride, summed_stride, HIGH, WIDE)
    of_groups = tl.reshape(tl.max(size_bits(y), axis=1), [HIGH, WIDE // 16])
    if BY_ROW:
        tl.atomic_max(line_ptr + r, tl.max(of_groups, axis=1), mask=r < rows)
    else:
        g = tl.program_id(1).to(tl.int64) * (WIDE // 16) + tl.arange(0, WIDE // 16)
        tl.atomic_max(line_ptr + g, tl.max(of_groups, axis=0), mask=g < summed // 16)


@triton.jit
def _rotate(
    x_ptr, signs_ptr, out_ptr, rows, summed, row_stride, summed_stride, HIGH: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * HIGH + tl.arange(0, HIGH)
    s = tl.program_id(1).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    y = rotated_tile(x_ptr, signs_ptr, r, s, rows, summed, row_stride, summed_stride, HIGH, WIDE)
    inside = (r < rows)[:, None] & (s < summed)[None, :]
    tl.store(out_ptr + r[:, None] * summed + s[None, :], tl.reshape(y, [HIGH, WIDE]), mask=inside)


@triton.jit
def _quantise(
    x_ptr, signs_ptr, amax_ptr, noise_ptr, codes_ptr, scales_ptr, rows, summed, row_stride, summed_stride,
    amax_of_row, amax_of_group, noise_row, noise_summed,
    STOCHASTIC: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A group is a block: its scale is known as soon as it is rotated."""
    GROUPS: tl.constexpr = HIGH * WIDE // 16
    r = tl.program_id(0).to(tl.int64) * HIGH + tl.arange(0, HIGH)
    first = tl.program_id(1).to(tl.int64) * WIDE
    s, g = first + tl.arange(0, WIDE), first // 16 + tl.arange(0, WIDE // 16)
    y = rotated_tile(x_ptr, signs_ptr, r, s, rows, summed, row_stride, summed_stride, HIGH, WIDE)
    whole = (r < rows)[:, None] & (g < summed // 16)[None, :]
    amax = tl.load(amax_ptr + r[:, None] * amax_of_row + g[None, :] * amax_of_group, mask=whole, other=0)
    tensor_factor, tensor_stored = float32_scale(tl.reshape(size_bits(amax), [GROUPS]), 2688.0, 11, False)
    factor, scale = nvfp4_scale(tl.max(size_bits(y), axis=1), tensor_factor, tensor_stored)
    noise = y
    if STOCHASTIC:
        inside = (r < rows)[:, None] & (s < summed)[None, :]
        noise = tl.load(noise_ptr + r[:, None] * noise_row + s[None, :] * noise_summed, mask=inside, other=0)
        noise = tl.reshape(noise.to(tl.float64), [GROUPS, 16])
    codes = tl.reshape(pack(encode(scaled(y, factor[:, None]), noise, "e2m1", STOCHASTIC)), [HIGH, WIDE // 2])
    b = first // 2 + tl.arange(0, WIDE // 2)
    bytes_inside = (r < rows)[:, None] & (b < summed // 2)[None, :]
    tl.store(codes_ptr + r[:, None] * (summed // 2) + b[None, :], codes, mask=bytes_inside)
    tl.store(scales_ptr + r[:, None] * (summed // 16) + g[None, :], tl.reshape(scale, [HIGH, WIDE // 16]), mask=whole)
