"""Triton kernels that round SwiGLU times a row's weight to low precision without writing it in between (report section 4.3.4).

core/precision/activation.py has the definition. The activation is that of swiglu.py, rounded to the operands' dtype as if it had been
written, so that whether the two are fused shows in no bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.kernels.casts import Cast
from core.kernels.triton.rounding import encode, float32_scale, mx_scale, nvfp4_scale, pack, scaled, size_bits, widen
from core.kernels.triton.swiglu import rows_of, sigmoid_of
from core.kernels.triton.tiles import NUMBERS_PER_PROGRAM, tile


def largest_of_rows(gate_RF: Tensor, up_RF: Tensor, weight_R: Tensor | None) -> Tensor:
    """The largest size in each row of the activation, [R] float32; NaN where there is one. Operands of float32 or narrower."""
    largest_R = torch.zeros(gate_RF.shape[0], dtype=torch.int32, device=gate_RF.device)
    if gate_RF.numel():
        rows, width = gate_RF.shape
        gate, up = rows_of(gate_RF), rows_of(up_RF)
        high, wide = tile(width)
        _largest[(triton.cdiv(rows, high), triton.cdiv(width, wide))](
            gate, up, None if weight_R is None else weight_R.contiguous(), largest_R, rows, width,
            gate.stride(0), up.stride(0),
            WEIGHTED=weight_R is not None, HIGH=high, WIDE=wide, enable_fp_fusion=False,
        )  # fmt: skip
    return largest_R.view(torch.float32)


def quantise_rows(
    gate_RF: Tensor, up_RF: Tensor, weight_R: Tensor | None, how: Cast, amax_R: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Codes of the activation, uint8 [R, F], or two to a byte [R, ceil(F / 2)]; scales of its blocks; the largest of each row [R].

    amax_R: float32, of what each row shares a scale with, for `tensor`, whose scales the caller knows, and `nvfp4`. Scales are [R,
    ceil(F / block)] float32, or their codes in uint8. Operands as of `largest_of_rows`.
    """
    (rows, width), device = gate_RF.shape, gate_RF.device
    columns = triton.cdiv(width, 2) if how.packed else width
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=device)
    kind = torch.float32 if how.kind == "float32" else torch.uint8
    scales = None
    block = how.block[1]
    if how.kind != "tensor":
        scales = torch.empty(rows, triton.cdiv(width, block), dtype=kind, device=device)
    largest_R = torch.zeros(rows, dtype=torch.int32, device=device)
    if codes.numel():
        gate, up = rows_of(gate_RF), rows_of(up_RF)
        high, wide = _tile(width, block)
        _quantise[(triton.cdiv(rows, high), triton.cdiv(width, wide))](
            gate, up, None if weight_R is None else weight_R.contiguous(), amax_R, largest_R, codes, scales, rows, width,
            gate.stride(0), up.stride(0), columns, 0 if scales is None else scales.shape[1],
            WEIGHTED=weight_R is not None, KIND=how.kind, EXACT=how.exact, ELEMENT=how.element, LARGEST=how.largest,
            MAX_EXPONENT=how.max_exponent, BLOCK=block, HIGH=high, WIDE=wide,
            enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scales, largest_R.view(torch.float32)


def _tile(width: int, block: int) -> tuple[int, int]:
    """Rows and columns of a program's tile, whole blocks and pairs."""
    _, wide = tile(width)
    wide = max(wide, block, 2)
    return max(1, NUMBERS_PER_PROGRAM // wide), wide


@triton.jit
def _activation(gate_ptr, up_ptr, weight_ptr, r, f, rows, width, gate_stride, up_stride, WEIGHTED: tl.constexpr):
    """A tile of what `forward` of swiglu.py writes, as it would be read again in float32; zeros outside."""
    inside = (r < rows)[:, None] & (f < width)[None, :]
    gate = tl.load(gate_ptr + r[:, None] * gate_stride + f[None, :], mask=inside, other=0).to(tl.float32)
    up = tl.load(up_ptr + r[:, None] * up_stride + f[None, :], mask=inside, other=0).to(tl.float32)
    act = gate * sigmoid_of(gate) * up
    if WEIGHTED:
        act = act * tl.load(weight_ptr + r, mask=r < rows, other=0).to(tl.float32)[:, None]
    return tl.where(inside, widen(act.to(gate_ptr.dtype.element_ty)), 0.0)


@triton.jit
def _largest(
    gate_ptr, up_ptr, weight_ptr, largest_ptr, rows, width, gate_stride, up_stride,
    WEIGHTED: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * HIGH + tl.arange(0, HIGH)
    f = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    x = _activation(gate_ptr, up_ptr, weight_ptr, r, f, rows, width, gate_stride, up_stride, WEIGHTED)
    tl.atomic_max(largest_ptr + r, tl.max(size_bits(x), axis=1), mask=r < rows)


@triton.jit
def _quantise(
    gate_ptr, up_ptr, weight_ptr, amax_ptr, largest_ptr, codes_ptr, scales_ptr, rows, width,
    gate_stride, up_stride, columns, blocks,
    WEIGHTED: tl.constexpr, KIND: tl.constexpr, EXACT: tl.constexpr, ELEMENT: tl.constexpr, LARGEST: tl.constexpr,
    MAX_EXPONENT: tl.constexpr, BLOCK: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * HIGH + tl.arange(0, HIGH)
    first = tl.program_id(1) * WIDE
    f = first + tl.arange(0, WIDE)
    x = _activation(gate_ptr, up_ptr, weight_ptr, r, f, rows, width, gate_stride, up_stride, WEIGHTED)
    tl.atomic_max(largest_ptr + r, tl.max(size_bits(x), axis=1), mask=r < rows)
    if KIND == "tensor":
        amax = size_bits(tl.load(amax_ptr + r, mask=r < rows, other=0))
        factor, _ = float32_scale(amax, LARGEST, MAX_EXPONENT, False)
        codes = encode(scaled(x, factor[:, None]), x, ELEMENT, False)
    else:
        BLOCKS: tl.constexpr = HIGH * (WIDE // BLOCK)
        x = tl.reshape(x, [BLOCKS, BLOCK])
        block_amax = tl.max(size_bits(x), axis=1)
        if KIND == "nvfp4":
            amax = size_bits(tl.load(amax_ptr + r, mask=r < rows, other=0))
            amax = tl.reshape(tl.broadcast_to(amax[:, None], [HIGH, WIDE // BLOCK]), [BLOCKS])
            tensor_factor, tensor_stored = float32_scale(amax, LARGEST, MAX_EXPONENT, False)
            factor, scale = nvfp4_scale(block_amax, tensor_factor, tensor_stored)
        elif KIND == "mx":
            factor, scale = mx_scale(block_amax, ELEMENT, EXACT)
        else:
            factor, scale = float32_scale(block_amax, LARGEST, MAX_EXPONENT, EXACT)
        codes = encode(scaled(x, factor[:, None]), x, ELEMENT, False)
        b = first // BLOCK + tl.arange(0, WIDE // BLOCK)
        tl.store(
            scales_ptr + r[:, None] * blocks + b[None, :],
            tl.reshape(scale, [HIGH, WIDE // BLOCK]),
            mask=(r < rows)[:, None] & (b < blocks)[None, :],
        )
    if ELEMENT == "e2m1":
        c = first // 2 + tl.arange(0, WIDE // 2)
        codes = tl.reshape(pack(codes), [HIGH, WIDE // 2])
    else:
        c = f
        codes = tl.reshape(codes, [HIGH, WIDE])
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    tl.store(codes_ptr + r[:, None] * columns + c[None, :], codes, mask=inside)
