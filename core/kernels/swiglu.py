"""SwiGLU times a weight per row: silu(gate) * up * weight, with the backward that recomputes (report section 4.3.4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up_R2F: Tensor, weight_R: Tensor | None = None) -> Tensor:
    """silu(gate) * up, times weight_R where given: [R, F] in the input's dtype. gate_up_R2F: [R, 2 * F], gate first.

    The definition; autograd differentiates it.
    """
    gate, up = gate_up_R2F.chunk(2, dim=-1)
    act = F.silu(gate) * up
    return act if weight_R is None else act * weight_R.to(act.dtype)[:, None]


def swiglu_forward(gate_RF: Tensor, up_RF: Tensor, weight_R: Tensor | None) -> Tensor:
    """`swiglu` without autograd, on operands of one float dtype."""
    act = F.silu(gate_RF).mul_(up_RF)
    return act if weight_R is None else act.mul_(weight_R[:, None])


def swiglu_backward(
    grad_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, weight_R: Tensor | None, *, out_gate: Tensor, out_up: Tensor
) -> Tensor | None:
    """The gradients of `swiglu` given that of its result; those of gate and up are written to out_gate and out_up.

    Overwrites grad_RF. Returns the gradient of weight_R [R], or None without one.
    """
    sigmoid = torch.sigmoid(gate_RF)
    silu = gate_RF * sigmoid
    grad_weight = None
    if weight_R is not None:
        grad_weight = torch.linalg.vecdot(grad_RF, silu * up_RF)
        grad_RF = grad_RF.mul_(weight_R[:, None])
    torch.mul(grad_RF, silu, out=out_up)
    # d silu / d gate = sigmoid + silu * (1 - sigmoid)
    derivative = torch.addcmul(sigmoid, silu, 1.0 - sigmoid)
    torch.mul(grad_RF.mul_(up_RF), derivative, out=out_gate)
    return grad_weight
