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
) -> tuple[Tensor, Tensor | None]:
    """The gradients of `swiglu` given that of its result; those of gate and up are written to out_gate and out_up.

    Overwrites grad_RF. Returns the result itself [R, F], made anew because nobody kept it, and the gradient of weight_R [R].
    """
    silu = F.silu(gate_RF)
    act, grad_weight = silu * up_RF, None
    if weight_R is not None:
        grad_weight = torch.linalg.vecdot(grad_RF, act)
        act.mul_(weight_R[:, None])
        grad_RF.mul_(weight_R[:, None])
    torch.mul(grad_RF, silu, out=out_up)
    torch.ops.aten.silu_backward.grad_input(grad_RF.mul_(up_RF), gate_RF, grad_input=out_gate)
    return act, grad_weight
