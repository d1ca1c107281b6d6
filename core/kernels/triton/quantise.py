"""Triton kernel that rounds matrices to a low-precision format: row-wise, transposed, or both from one read (report section 5.3).

Bit for bit what core/precision/formats.py and grouped.py define. A program rounds one tile, and turns it round in the chip before it
writes the transposed copy, so that both copies are written in whole stretches.
Shape letters: B matrices, R rows, C columns; E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.kernels.casts import Cast
from core.kernels.triton.amax import TensorScales
from core.kernels.triton.rounding import encode, float32_scale, mx_scale, nvfp4_scale, pack, scaled, size_bits, widen


class Copy(NamedTuple):
    """codes: uint8 [B, R, C], or [B, R, ceil(C / 2)] of two each. scales: on the grid of blocks, float32 or the bits in uint8.

    Of the kind tensor there are none, and nothing is written to what stands there.
    """

    codes: Tensor
    scales: Tensor


def cast(
    x_BRC: Tensor,
    how: Cast,
    tensor: TensorScales | None,
    *,
    rows: bool,
    turned: bool,
    noise: Tensor | None,
    turned_noise: Tensor | None = None,
) -> tuple[Copy | None, Copy | None]:
    """The row-wise copy of x and the transposed one [B, C, R], whose blocks lie along R; those that are asked for.

    tensor: for the kinds tensor and nvfp4. noise, turned_noise: of the copies' own shapes, which rounds them stochastically. Where scales
    are symmetric both copies have the same codes; then a noise comes with the first that is asked for.
    """
    matrices, height, width = x_BRC.shape
    copies = (
        _room(x_BRC.device, (matrices, height, width), how) if rows else None,
        _room(x_BRC.device, (matrices, width, height), how) if turned else None,
    )
    if not x_BRC.numel():
        return copies
    if how.symmetric and noise is None and turned_noise is not None:
        noise, turned_noise = turned_noise.transpose(1, 2), None
    if x_BRC.stride(2) != 1 and x_BRC.stride(1) == 1 and (tensor is None or tensor.owner_R is None):
        # The transpose of what lies there row by row.
        noises = (turned_noise, noise)
        if how.symmetric and noise is not None:
            noises = (noise.transpose(1, 2), None)
        _launch(x_BRC.transpose(1, 2), how, tensor, noises, (copies[1], copies[0]))
    else:
        _launch(x_BRC, how, tensor, (noise, turned_noise), copies)
    return copies


def _room(device: torch.device, shape: tuple[int, int, int], how: Cast) -> Copy:
    matrices, rows, columns = shape
    codes = torch.empty(matrices, rows, -(-columns // 2) if how.packed else columns, dtype=torch.uint8, device=device)
    grid = matrices, -(-rows // how.block[0]), -(-columns // how.block[1])
    if how.kind == "tensor":
        grid = matrices, 0, 0
    return Copy(codes, torch.empty(grid, dtype=torch.float32 if how.kind == "float32" else torch.uint8, device=device))


def _tile(how: Cast, turned: bool, stochastic: bool) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, and its warps: whole blocks, both ways long enough to write whole sectors.

    A thread of a tile that is turned round holds 16 or 32 numbers; with more its registers would not do.
    """
    if stochastic:  # which holds float64 beside every number
        return max(32, *how.block), max(64, *how.block), 8
    if max(how.block) > 64 and (turned or how.block[0] > 1):
        return max(how.block), max(how.block), 16 if turned else 8
    return (64, 64, 8) if turned else (max(16, how.block[0]), max(128, how.block[1]), 4)


def _launch(
    x_BRC: Tensor,
    how: Cast,
    tensor: TensorScales | None,
    noises: tuple[Tensor | None, Tensor | None],
    copies: tuple[Copy | None, Copy | None],
) -> None:
    matrices, rows, columns = x_BRC.shape
    (noise, turned_noise), (codes, turned) = noises, copies
    high, wide, warps = _tile(how, turned is not None, noise is not None or turned_noise is not None)
    _cast[(triton.cdiv(rows, high) * triton.cdiv(columns, wide), matrices)](
        x_BRC, noise, turned_noise,
        None if tensor is None else tensor.factor_N,
        None if tensor is None else tensor.stored_N,
        None if tensor is None else tensor.owner_R,
        *(codes or (None, None)), *(turned or (None, None)), rows, columns,
        columns if codes is None else codes.codes.shape[2], rows if turned is None else turned.codes.shape[2],
        *x_BRC.stride(),
        *((0, 0, 0) if noise is None else noise.stride()),
        *((0, 0, 0) if turned_noise is None else turned_noise.stride()),
        KIND=how.kind, ELEMENT=how.element, LARGEST=how.largest, MAX_EXPONENT=how.max_exponent, EXACT=how.exact,
        BLOCK_R=how.block[0], BLOCK_C=how.block[1],
        ROWS=codes is not None, TURNED=turned is not None,
        STOCHASTIC=noise is not None, TURNED_STOCHASTIC=turned_noise is not None,
        GROUPED=tensor is not None and tensor.owner_R is not None, HIGH=high, WIDE=wide,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _cast(
    x_ptr, noise_ptr, turned_noise_ptr, factor_ptr, stored_ptr, owner_ptr,
    codes_ptr, scales_ptr, turned_ptr, turned_scales_ptr, rows, columns, codes_width, turned_width,
    x_matrix, x_row, x_column, noise_matrix, noise_row, noise_column, turned_matrix, turned_row, turned_column,
    KIND: tl.constexpr, ELEMENT: tl.constexpr, LARGEST: tl.constexpr, MAX_EXPONENT: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, TURNED: tl.constexpr,
    STOCHASTIC: tl.constexpr, TURNED_STOCHASTIC: tl.constexpr, GROUPED: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(columns, WIDE)
    down = (tl.program_id(0) // across).to(tl.int64)
    right = (tl.program_id(0) % across).to(tl.int64)
    r = down * HIGH + tl.arange(0, HIGH)
    c = right * WIDE + tl.arange(0, WIDE)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    place = x_ptr + matrix * x_matrix + r[:, None] * x_row + c[None, :] * x_column
    x = widen(tl.load(place, mask=inside, other=0))
    noise = x
    if STOCHASTIC:
        place = noise_ptr + matrix * noise_matrix + r[:, None] * noise_row + c[None, :] * noise_column
        noise = tl.load(place, mask=inside, other=0.5).to(tl.float64)
    factor_bits, stored_bits = _of_tensor(factor_ptr, stored_ptr, owner_ptr, matrix, r, rows, KIND, GROUPED, HIGH)
    SYMMETRIC: tl.constexpr = BLOCK_R == BLOCK_C
    if ROWS or SYMMETRIC:
        codes, scales = _codes(
            x, noise, factor_bits, stored_bits,
            KIND, ELEMENT, LARGEST, MAX_EXPONENT, EXACT, BLOCK_R, BLOCK_C, STOCHASTIC, HIGH, WIDE,
        )  # fmt: skip
    if ROWS:
        start = codes_ptr + matrix * rows * codes_width
        _store_codes(start, codes, down, right, rows, columns, codes_width, ELEMENT, HIGH, WIDE)
        _store_scales(scales_ptr, scales, matrix, down, right, rows, columns, KIND, BLOCK_R, BLOCK_C, HIGH, WIDE)
    if TURNED:
        if not SYMMETRIC:
            turned_noise = x
            if TURNED_STOCHASTIC:
                place = turned_noise_ptr + matrix * turned_matrix + c[None, :] * turned_row + r[:, None] * turned_column
                turned_noise = tl.load(place, mask=inside, other=0.5).to(tl.float64)
            codes, scales = _codes(
                x, turned_noise, factor_bits, stored_bits,
                KIND, ELEMENT, LARGEST, MAX_EXPONENT, EXACT, BLOCK_C, BLOCK_R, TURNED_STOCHASTIC, HIGH, WIDE,
            )  # fmt: skip
        start = turned_ptr + matrix * columns * turned_width
        _store_codes(start, tl.trans(codes), right, down, columns, rows, turned_width, ELEMENT, WIDE, HIGH)
        if KIND != "tensor":
            scales = tl.trans(scales)
        _store_scales(turned_scales_ptr, scales, matrix, right, down, columns, rows, KIND, BLOCK_R, BLOCK_C, WIDE, HIGH)


@triton.jit
def _of_tensor(
    factor_ptr, stored_ptr, owner_ptr, matrix, r, rows, KIND: tl.constexpr, GROUPED: tl.constexpr, HIGH: tl.constexpr
):  # fmt: skip
    """Factor and stored scale of the matrix, or of the expert of each row, [HIGH]: as bits, since a NaN must get through a maximum."""
    factor = tl.zeros([HIGH], tl.int32)
    stored = tl.zeros([HIGH], tl.int32)
    if KIND == "tensor" or KIND == "nvfp4":
        owner = tl.full([HIGH], 0, tl.int64) + matrix
        if GROUPED:
            owner = tl.load(owner_ptr + r, mask=r < rows, other=0).to(tl.int64)
        factor = tl.load(factor_ptr + owner, mask=r < rows, other=0).to(tl.int32, bitcast=True)
        stored = tl.load(stored_ptr + owner, mask=r < rows, other=0).to(tl.int32, bitcast=True)
    return factor, stored


@triton.jit
def _codes(
    x, noise, factor_bits, stored_bits,
    KIND: tl.constexpr, ELEMENT: tl.constexpr, LARGEST: tl.constexpr, MAX_EXPONENT: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, STOCHASTIC: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Codes of a tile [HIGH, WIDE] under blocks [BLOCK_R, BLOCK_C], and the scales as they are stored, one for a block."""
    if KIND == "tensor":
        scales = factor_bits
        codes = encode(scaled(x, factor_bits.to(tl.float32, bitcast=True)[:, None]), noise, ELEMENT, STOCHASTIC)
    else:
        DOWN: tl.constexpr = HIGH // BLOCK_R
        RIGHT: tl.constexpr = WIDE // BLOCK_C
        blocks = tl.reshape(x, (DOWN, BLOCK_R, RIGHT, BLOCK_C))
        amax = tl.max(tl.max(size_bits(blocks), axis=3), axis=1)
        if KIND == "float32":
            factor, scales = float32_scale(amax, LARGEST, MAX_EXPONENT, EXACT)
        elif KIND == "mx":
            factor, scales = mx_scale(amax, ELEMENT, EXACT)
        else:
            # All rows of a block are one expert's; rows past the last are zeros here.
            of_tensor = tl.max(tl.reshape(factor_bits, (DOWN, BLOCK_R)), axis=1).to(tl.float32, bitcast=True)
            unit = tl.max(tl.reshape(stored_bits, (DOWN, BLOCK_R)), axis=1).to(tl.float32, bitcast=True)
            factor, scales = nvfp4_scale(amax, of_tensor[:, None], unit[:, None])
        product = scaled(blocks, factor[:, None, :, None])
        if STOCHASTIC:
            noise = tl.reshape(noise, (DOWN, BLOCK_R, RIGHT, BLOCK_C))
        codes = tl.reshape(encode(product, noise, ELEMENT, STOCHASTIC), (HIGH, WIDE))
    return codes, scales


@triton.jit
def _store_codes(
    ptr, codes, down, right, rows, columns, width, ELEMENT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """The codes of tile [down, right] to a matrix of rows of `width` bytes that begins at ptr; an odd row of four bits ends in a zero."""
    r = down * HIGH + tl.arange(0, HIGH)
    c = right * WIDE + tl.arange(0, WIDE)
    if ELEMENT == "e2m1":
        codes = pack(tl.where((c < columns)[None, :], codes, 0))
        c = right * (WIDE // 2) + tl.arange(0, WIDE // 2)
    tl.store(ptr + r[:, None] * width + c[None, :], codes, mask=(r < rows)[:, None] & (c < width)[None, :])


@triton.jit
def _store_scales(
    ptr, scales, matrix, down, right, rows, columns,
    KIND: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The scales of tile [down, right] to their place in the grid of blocks, where blocks have some."""
    if KIND != "tensor":
        high, wide = tl.cdiv(rows, BLOCK_R), tl.cdiv(columns, BLOCK_C)
        r = down * (HIGH // BLOCK_R) + tl.arange(0, HIGH // BLOCK_R)
        c = right * (WIDE // BLOCK_C) + tl.arange(0, WIDE // BLOCK_C)
        start = ptr + matrix * high * wide
        tl.store(start + r[:, None] * wide + c[None, :], scales, mask=(r < high)[:, None] & (c < wide)[None, :])
