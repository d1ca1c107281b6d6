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
# Rows and groups, where a thread holds all points of its groups.
_TURNED_GROUPS = (64, 8)


def largest_of_lines(x: Tensor, signs: Tensor, *, along: Along) -> Tensor:
    """The largest size in each line of the rotated x: of rows [R] where `along` is 1, of groups [S / 16] where it is 0; float32.

    NaN where a line is not a number. x: two dimensions of float32 or narrower, that of the groups a multiple of 16; signs: [16].
    """
    rows, summed = _sizes(x, along)
    lines = torch.zeros(rows if along == 1 else summed // POINTS, dtype=torch.int32, device=x.device)
    if not x.numel():
        return lines.view(torch.float32)
    signs = signs.to(x.device)
    if along == 1:
        high, wide = _tile(summed, along)
        _largest[(triton.cdiv(rows, high), triton.cdiv(summed, wide))](
            x, signs, lines, rows, summed, *x.stride(), HIGH=high, WIDE=wide, enable_fp_fusion=False
        )
    else:
        high, groups = _TURNED_GROUPS
        _turned_largest[(triton.cdiv(rows, high), triton.cdiv(summed // POINTS, groups))](
            x, signs, lines, rows, summed, x.stride(1), x.stride(0), HIGH=high, GROUPS=groups, num_warps=2,
            enable_fp_fusion=False,
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
    if not x.numel():
        return codes, scales
    signs, each, noise_strides = signs.to(x.device), int(amax.numel() > 1), (0, 0) if noise is None else noise.stride()
    if along == 1:
        high, wide = _tile(summed, along)
        _quantise[(triton.cdiv(rows, high), triton.cdiv(summed, wide))](
            x, signs, amax.contiguous(), noise, codes, scales, rows, summed, *x.stride(), each, *noise_strides,
            STOCHASTIC=noise is not None, HIGH=high, WIDE=wide, enable_fp_fusion=False,
        )  # fmt: skip
    else:
        high, groups = _TURNED_GROUPS
        _turned_quantise[(triton.cdiv(rows, high), triton.cdiv(summed // POINTS, groups))](
            x, signs, amax.contiguous(), noise, codes.view(torch.int64), scales, rows, summed,
            x.stride(1), x.stride(0), each, *noise_strides,
            STOCHASTIC=noise is not None, HIGH=high, GROUPS=groups, num_warps=4 if noise is None else 8, enable_fp_fusion=False,
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
    x_ptr, signs_ptr, line_ptr, rows, summed, row_stride, summed_stride, HIGH: tl.constexpr, WIDE: tl.constexpr
):
    r = tl.program_id(0).to(tl.int64) * HIGH + tl.arange(0, HIGH)
    s = tl.program_id(1).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    y = rotated_tile(x_ptr, signs_ptr, r, s, rows, summed, row_stride, summed_stride, HIGH, WIDE)
    of_groups = tl.reshape(tl.max(size_bits(y), axis=1), [HIGH, WIDE // 16])
    tl.atomic_max(line_ptr + r, tl.max(of_groups, axis=1), mask=r < rows)


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
    amax_of_row, noise_row, noise_summed,
    STOCHASTIC: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A group is a block: its scale is known as soon as it is rotated."""
    GROUPS: tl.constexpr = HIGH * WIDE // 16
    r = tl.program_id(0).to(tl.int64) * HIGH + tl.arange(0, HIGH)
    first = tl.program_id(1).to(tl.int64) * WIDE
    s, g = first + tl.arange(0, WIDE), first // 16 + tl.arange(0, WIDE // 16)
    y = rotated_tile(x_ptr, signs_ptr, r, s, rows, summed, row_stride, summed_stride, HIGH, WIDE)
    whole = (r < rows)[:, None] & (g < summed // 16)[None, :]
    amax = tl.load(amax_ptr + r * amax_of_row, mask=r < rows, other=0)
    amax = tl.reshape(tl.broadcast_to(amax[:, None], [HIGH, WIDE // 16]), [GROUPS])
    tensor_factor, tensor_stored = float32_scale(size_bits(amax), 2688.0, 11, False)
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


@triton.jit
def _turned_groups(x_ptr, signs_ptr, r, g, rows, summed, row_stride, summed_stride):
    """The 16 points of the rotated groups, each a tile [groups, rows]; no thread needs another's numbers."""
    inside = (g < summed // 16)[:, None] & (r < rows)[None, :]
    place = x_ptr + g[:, None] * 16 * summed_stride + r[None, :] * row_stride
    x = ()
    for i in tl.static_range(16):
        number = widen(tl.load(place + i * summed_stride, mask=inside, other=0))
        x = x + (number * tl.load(signs_ptr + i),)  # type: ignore[assignment]
    for stage in tl.static_range(4):
        y = ()
        for i in tl.static_range(16):
            point = (x[i] + x[i + (1 << stage)]) if (i >> stage) % 2 == 0 else (x[i - (1 << stage)] - x[i])  # type: ignore[var-annotated]
            y = y + (point,)  # type: ignore[assignment]
        x = y
    y = ()
    for i in tl.static_range(16):
        y = y + (x[i] * 0.25,)  # type: ignore[assignment]
    return y


@triton.jit
def _largest_point(y, HIGH: tl.constexpr, GROUPS: tl.constexpr):
    """The bits of the largest size of every group."""
    largest = tl.zeros([GROUPS, HIGH], tl.int32)
    for i in tl.static_range(16):
        largest = tl.maximum(largest, size_bits(y[i]))
    return largest


@triton.jit
def _turned_largest(
    x_ptr, signs_ptr, line_ptr, rows, summed, row_stride, summed_stride, HIGH: tl.constexpr, GROUPS: tl.constexpr
):
    r = tl.program_id(0).to(tl.int64) * HIGH + tl.arange(0, HIGH)
    g = tl.program_id(1).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    y = _turned_groups(x_ptr, signs_ptr, r, g, rows, summed, row_stride, summed_stride)
    largest = tl.max(_largest_point(y, HIGH, GROUPS), axis=1)
    tl.atomic_max(line_ptr + g, largest, mask=g < summed // 16)


@triton.jit
def _turned_quantise(
    x_ptr, signs_ptr, amax_ptr, noise_ptr, codes_ptr, scales_ptr, rows, summed, row_stride, summed_stride,
    amax_of_group, noise_row, noise_summed, STOCHASTIC: tl.constexpr, HIGH: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Sixteen codes of a group make one number of 64 bits, the first in its lowest: only these, and scales, change threads."""
    r = tl.program_id(0).to(tl.int64) * HIGH + tl.arange(0, HIGH)
    g = tl.program_id(1).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    y = _turned_groups(x_ptr, signs_ptr, r, g, rows, summed, row_stride, summed_stride)
    amax = tl.load(amax_ptr + g * amax_of_group, mask=g < summed // 16, other=0)[:, None]
    tensor_factor, tensor_stored = float32_scale(size_bits(amax), 2688.0, 11, False)
    factor, scale = nvfp4_scale(_largest_point(y, HIGH, GROUPS), tensor_factor, tensor_stored)
    inside = (g < summed // 16)[:, None] & (r < rows)[None, :]
    word = tl.zeros([GROUPS, HIGH], tl.int64)
    for i in tl.static_range(16):
        noise = y[i]
        if STOCHASTIC:
            place = noise_ptr + (g[:, None] * 16 + i) * noise_summed + r[None, :] * noise_row
            noise = tl.load(place, mask=inside, other=0).to(tl.float64)
        code = encode(scaled(y[i], factor), noise, "e2m1", STOCHASTIC)
        word = word | (code.to(tl.int64) << (4 * i))
    place = r[None, :] * (summed // 16) + g[:, None]
    tl.store(codes_ptr + place, word, mask=inside)
    tl.store(scales_ptr + place, scale, mask=inside)
