"""Triton kernels of grouped products: rows in contiguous pieces, one matrix per piece (report section 4.3.2).

Where the pieces end is read on the device, and no grid depends on it, so that the host never waits. Operands in bfloat16, float16 or
float32, products of which are summed in float32 (of float32 operands without rounding them to tf32).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tiles of the result (HIGH rows, WIDE columns), how much of the sum is taken at a time, and warps and stages of the pipeline. Tensor
# cores of Hopper and Blackwell want 64 rows at least for each of one or two groups of four warps; smaller ones are for small pieces.
_TILES = (
    (128, 256, 64, 8, 3),
    (256, 128, 64, 8, 3),
    (128, 128, 64, 8, 4),
    (128, 128, 32, 4, 4),
    (64, 256, 64, 4, 4),
    (64, 128, 64, 4, 4),
)
# Float32 is multiplied without tensor cores, number by number: large tiles would take minutes to compile and not fit the registers.
_TILES_OF_FLOAT32 = ((64, 64, 32, 4, 3), (128, 64, 16, 8, 3), (64, 128, 16, 8, 3))
# The interpreter has no shared memory to fill, but every size should be masked somewhere in a small test.
_INTERPRETED = {"HIGH": 32, "WIDE": 32, "DEEP": 32, "EXACT": False}


def product(x_RC: Tensor, matrices: Tensor, ends_E: Tensor) -> Tensor:
    """Each row times the matrix [C, N] of its piece: [R, N]; matrices: [E, C, N] in any strides, as a transposed view has them.

    ends_E: [E] int32 on the device, ascending, where the pieces of 0 to R rows end. Rows behind the last end give zeros, whatever
    they are. Output in x's dtype. Raises ValueError for other dtypes and for shapes that do not fit.
    """
    _check(x_RC, matrices, ends_E)
    (rows, depth), (experts, inner, width) = x_RC.shape, matrices.shape
    if inner != depth or len(ends_E) != experts:
        raise ValueError(f"rows of {depth} and {len(ends_E)} pieces do not fit matrices of {tuple(matrices.shape)}")
    out = x_RC.new_empty(rows, width)
    if not out.numel():
        return out
    if not experts or not depth:
        return out.zero_()

    def grid(meta: dict[str, Any]) -> tuple[int]:
        # Every piece may end in a tile that it does not fill, and so may the rows of no piece.
        return ((triton.cdiv(rows, meta["HIGH"]) + experts) * triton.cdiv(width, meta["WIDE"]),)

    kernel, sizes = _chosen(_product, _tuned_product, x_RC)
    kernel[grid](
        x_RC, matrices, out, ends_E.contiguous(), rows, depth, width, experts, x_RC.stride(0), x_RC.stride(1),
        matrices.stride(0), matrices.stride(1), matrices.stride(2), PIECES=triton.next_power_of_2(experts + 1), **sizes,
    )  # fmt: skip
    return out


def weight_gradient(grad_RN: Tensor, x_RC: Tensor, ends_E: Tensor) -> Tensor:
    """Each piece's grad.T @ x: [E, N, C] in x's dtype, zeros for a piece without rows; other arguments as for `product`."""
    _check(grad_RN, x_RC, ends_E)
    if len(grad_RN) != len(x_RC):
        raise ValueError(f"{len(grad_RN)} rows of the gradient belong to {len(x_RC)} rows")
    (rows, width), depth, experts = grad_RN.shape, x_RC.shape[1], len(ends_E)
    out = x_RC.new_empty(experts, width, depth)
    if not out.numel():
        return out
    if not rows:
        return out.zero_()

    def grid(meta: dict[str, Any]) -> tuple[int, int]:
        return triton.cdiv(width, meta["HIGH"]) * triton.cdiv(depth, meta["WIDE"]), experts

    kernel, sizes = _chosen(_weight_gradient, _tuned_weight_gradient, x_RC)
    kernel[grid](
        grad_RN, x_RC, out, ends_E.contiguous(), width, depth, grad_RN.stride(0), grad_RN.stride(1), x_RC.stride(0),
        x_RC.stride(1), **sizes,
    )  # fmt: skip
    return out


def _check(a: Tensor, b: Tensor, ends_E: Tensor) -> None:
    if a.dtype != b.dtype or a.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"operands of {a.dtype} and {b.dtype}: both must be bfloat16, float16 or float32")
    if ends_E.dtype != torch.int32:
        raise ValueError(f"ends of pieces in {ends_E.dtype}: they must be int32")


def _chosen(plain: Any, tuned: Callable[[bool], Any], x: Tensor) -> tuple[Any, dict[str, Any]]:
    """The kernel and its tile, found by trying on the first call for a width and depth; a CPU tensor is for the interpreter."""
    if x.device.type == "cpu":
        return plain, _INTERPRETED
    return tuned(x.dtype == torch.float32), {"EXACT": True}


@cache
def _tuned_product(float32: bool) -> Any:
    return triton.autotune(_configs(float32), key=["depth", "width", "experts"])(_product)


@cache
def _tuned_weight_gradient(float32: bool) -> Any:
    return triton.autotune(_configs(float32), key=["depth", "width"])(_weight_gradient)


def _configs(float32: bool) -> list[Any]:
    """Those that ask for more than a device has are passed over by the autotuner."""
    return [
        triton.Config({"HIGH": high, "WIDE": wide, "DEEP": deep}, num_warps=warps, num_stages=stages)
        for high, wide, deep, warps, stages in (_TILES_OF_FLOAT32 if float32 else _TILES)
    ]


@triton.jit
def _dot(a, b, total, EXACT: tl.constexpr):
    """EXACT: multiply operands as they are. The interpreter multiplies bfloat16 wrongly, and wants float32."""
    if EXACT:
        return tl.dot(a, b, total, input_precision="ieee")
    return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")


@triton.jit
def _product(
    x_ptr, matrices_ptr, out_ptr, ends_ptr, rows, depth, width, experts, x_row, x_column,
    matrix, matrix_row, matrix_column,
    PIECES: tl.constexpr, EXACT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    # Programs that run at the same time take a square of tiles rather than a line, so that they share what they read.
    high_tiles = tl.cdiv(rows, HIGH) + experts
    wide_tiles = tl.cdiv(width, WIDE)
    band = 8 * wide_tiles
    first = tl.program_id(0) // band * 8
    tall = tl.minimum(high_tiles - first, 8)
    high_tile = first + tl.program_id(0) % band % tall
    wide_tile = tl.program_id(0) % band // tall

    # Which piece the tile is of: tiles are dealt to the pieces in turn, as many to each as it needs. The rows behind the last end
    # are one further piece, which has no matrix.
    piece = tl.arange(0, PIECES)
    end = tl.load(ends_ptr + piece, mask=piece < experts, other=rows)
    start = tl.load(ends_ptr + piece - 1, mask=(piece > 0) & (piece <= experts), other=0)
    tiles = tl.where(piece <= experts, (end - start + HIGH - 1) // HIGH, 0)
    upto = tl.cumsum(tiles, 0)
    mine = tl.sum((upto <= high_tile).to(tl.int32), 0)
    if mine > experts:
        return
    chosen = piece == mine
    begin = tl.sum(tl.where(chosen, start + (high_tile - upto + tiles) * HIGH, 0), 0)
    stop = tl.sum(tl.where(chosen, end, 0), 0)

    r = begin + tl.arange(0, HIGH)
    n = wide_tile * WIDE + tl.arange(0, WIDE)
    k = tl.arange(0, DEEP)
    x = x_ptr + r.to(tl.int64)[:, None] * x_row + k[None, :] * x_column
    b = (
        matrices_ptr
        + mine.to(tl.int64) * matrix
        + k.to(tl.int64)[:, None] * matrix_row
        + n.to(tl.int64)[None, :] * matrix_column
    )
    total = tl.zeros([HIGH, WIDE], tl.float32)
    # The mask is written with `depth` itself, whose divisibility the compiler knows, or it would load number by number.
    for at in range(0, tl.where(mine < experts, depth, 0), DEEP):
        xs = tl.load(x, mask=(r < stop)[:, None] & (k < depth - at)[None, :], other=0)
        bs = tl.load(b, mask=(k < depth - at)[:, None] & (n < width)[None, :], other=0)
        total = _dot(xs, bs, total, EXACT)
        x += DEEP * x_column
        b += DEEP * matrix_row
    out = out_ptr + r.to(tl.int64)[:, None] * width + n[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(r < stop)[:, None] & (n < width)[None, :])


@triton.jit
def _weight_gradient(
    grad_ptr, x_ptr, out_ptr, ends_ptr, width, depth, grad_row, grad_column, x_row, x_column,
    EXACT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """One tile [HIGH, WIDE] of one matrix [width, depth], summed over DEEP rows of its piece at a time."""
    piece = tl.program_id(1)
    high_tiles = tl.cdiv(width, HIGH)
    wide_tiles = tl.cdiv(depth, WIDE)
    band = 8 * wide_tiles
    first = tl.program_id(0) // band * 8
    tall = tl.minimum(high_tiles - first, 8)
    n = (first + tl.program_id(0) % band % tall) * HIGH + tl.arange(0, HIGH)
    c = tl.program_id(0) % band // tall * WIDE + tl.arange(0, WIDE)
    start = tl.load(ends_ptr + piece - 1, mask=piece > 0, other=0)
    stop = tl.load(ends_ptr + piece)

    r = start + tl.arange(0, DEEP)
    grad = grad_ptr + n.to(tl.int64)[:, None] * grad_column + r.to(tl.int64)[None, :] * grad_row
    x = x_ptr + r.to(tl.int64)[:, None] * x_row + c[None, :] * x_column
    total = tl.zeros([HIGH, WIDE], tl.float32)
    for at in range(start, stop, DEEP):
        left = stop - at
        grads = tl.load(grad, mask=(n < width)[:, None] & (tl.arange(0, DEEP) < left)[None, :], other=0)
        xs = tl.load(x, mask=(tl.arange(0, DEEP) < left)[:, None] & (c < depth)[None, :], other=0)
        total = _dot(grads, xs, total, EXACT)
        grad += DEEP * grad_row
        x += DEEP * x_row
    out = out_ptr + piece.to(tl.int64) * width * depth + n.to(tl.int64)[:, None] * depth + c[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(n < width)[:, None] & (c < depth)[None, :])
