"""Triton kernels of core/kernels/swiglu.py: SwiGLU times a row's weight, and the backward that recomputes (section 4.3.4)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.kernels.triton.tiles import sum_dtype, tile


def forward(gate_RF: Tensor, up_RF: Tensor, weight_R: Tensor | None) -> Tensor:
    """silu(gate) * up, times weight_R where given: [R, F] in the gate's dtype, computed in float32 and rounded once."""
    rows, width = gate_RF.shape
    out = torch.empty_like(gate_RF, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    gate, up = rows_of(gate_RF), rows_of(up_RF)
    high, wide = tile(width)
    _forward[(triton.cdiv(rows, high), triton.cdiv(width, wide))](
        gate, up, None if weight_R is None else weight_R.contiguous(), out, rows, width, gate.stride(0), up.stride(0),
        WEIGHTED=weight_R is not None, SUM=sum_dtype(gate.dtype), HIGH=high, WIDE=wide,
    )  # fmt: skip
    return out


def backward(
    grad_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, weight_R: Tensor | None,
    *, out_gate: Tensor, out_up: Tensor, out_act: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """In one pass the gradients of gate and up, written to out_gate and out_up, and the result of `forward`, to out_act.

    Rows of what is written to must each be contiguous. Returns the gradient of weight_R [R], summed in float32, or None.
    """
    rows, width = gate_RF.shape
    of_weight = None if weight_R is None else weight_R.new_zeros(rows)
    if not gate_RF.numel():
        return of_weight
    outs = [x for x in (out_gate, out_up, out_act) if x is not None]
    assert width == 1 or all(x.stride(1) == 1 for x in outs), "rows that are written to are not contiguous"
    grad, gate, up = rows_of(grad_RF), rows_of(gate_RF), rows_of(up_RF)
    high, wide = tile(width)
    _backward[(triton.cdiv(rows, high),)](
        grad, gate, up, None if weight_R is None else weight_R.contiguous(), out_gate, out_up, out_act, of_weight,
        rows, width, grad.stride(0), gate.stride(0), up.stride(0), out_gate.stride(0), out_up.stride(0),
        0 if out_act is None else out_act.stride(0),
        WEIGHTED=weight_R is not None, ACTIVATION=out_act is not None, SUM=sum_dtype(gate.dtype), HIGH=high, WIDE=wide,
    )  # fmt: skip
    return of_weight


def rows_of(x_RF: Tensor) -> Tensor:
    """x, each row contiguous; a half of wider rows stays where it is."""
    return x_RF if x_RF.stride(1) == 1 or x_RF.shape[1] == 1 else x_RF.contiguous()


@triton.jit
def sigmoid_of(x):
    """Never takes the exponential of a large number."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _forward(
    gate_ptr, up_ptr, weight_ptr, out_ptr, rows, width, gate_stride, up_stride,
    WEIGHTED: tl.constexpr, SUM: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * HIGH + tl.arange(0, HIGH)
    f = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = (r < rows)[:, None] & (f < width)[None, :]
    gate = tl.load(gate_ptr + r[:, None] * gate_stride + f[None, :], mask=inside, other=0).to(SUM)
    act = gate * sigmoid_of(gate) * tl.load(up_ptr + r[:, None] * up_stride + f[None, :], mask=inside, other=0).to(SUM)
    if WEIGHTED:
        act = act * tl.load(weight_ptr + r, mask=r < rows, other=0).to(SUM)[:, None]
    tl.store(out_ptr + r[:, None] * width + f[None, :], act.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad_ptr, gate_ptr, up_ptr, weight_ptr, out_gate_ptr, out_up_ptr, act_ptr, of_weight_ptr, rows, width,
    grad_stride, gate_stride, up_stride, out_gate_stride, out_up_stride, act_stride,
    WEIGHTED: tl.constexpr, ACTIVATION: tl.constexpr, SUM: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program takes whole rows, so that the weight's gradient is a sum in one fixed order."""
    r = tl.program_id(0).to(tl.int64) * HIGH + tl.arange(0, HIGH)
    if WEIGHTED:
        weight = tl.load(weight_ptr + r, mask=r < rows, other=0).to(SUM)[:, None]
        of_weight = tl.zeros([HIGH], SUM)
    for first in range(0, width, WIDE):
        f = first + tl.arange(0, WIDE)
        inside = (r < rows)[:, None] & (f < width)[None, :]
        grad = tl.load(grad_ptr + r[:, None] * grad_stride + f[None, :], mask=inside, other=0).to(SUM)
        gate = tl.load(gate_ptr + r[:, None] * gate_stride + f[None, :], mask=inside, other=0).to(SUM)
        up = tl.load(up_ptr + r[:, None] * up_stride + f[None, :], mask=inside, other=0).to(SUM)
        sigmoid = sigmoid_of(gate)
        silu = gate * sigmoid
        act = silu * up
        if WEIGHTED:
            of_weight += tl.sum(grad * act, axis=1)
            grad = grad * weight
            act = act * weight
        of_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        of_up = grad * silu
        tl.store(
            out_gate_ptr + r[:, None] * out_gate_stride + f[None, :],
            of_gate.to(out_gate_ptr.dtype.element_ty),
            mask=inside,
        )
        tl.store(
            out_up_ptr + r[:, None] * out_up_stride + f[None, :], of_up.to(out_up_ptr.dtype.element_ty), mask=inside
        )
        if ACTIVATION:
            tl.store(act_ptr + r[:, None] * act_stride + f[None, :], act.to(act_ptr.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(of_weight_ptr + r, of_weight.to(of_weight_ptr.dtype.element_ty), mask=r < rows)
