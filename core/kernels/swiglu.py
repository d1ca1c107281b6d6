"""SwiGLU times a weight per row: silu(gate) * up * weight, with the backward that recomputes (report section 4.3.4)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.backend import kernels_backend


def swiglu(gate_up_R2F: Tensor, weight_R: Tensor | None = None) -> Tensor:
    """silu(gate) * up, times weight_R where given: [R, F] in the input's dtype. gate_up_R2F: [R, 2 * F], gate first.

    Torch's form is the definition, and autograd differentiates it. Triton's is computed in float32, rounded once, and keeps
    nothing but its inputs.
    """
    if kernels_backend(gate_up_R2F.device) == "triton":
        return _TritonSwiGLU.apply(gate_up_R2F, weight_R)
    gate, up = gate_up_R2F.chunk(2, dim=-1)
    act = F.silu(gate) * up
    return act if weight_R is None else act * weight_R.to(act.dtype)[:, None]


def swiglu_forward(gate_RF: Tensor, up_RF: Tensor, weight_R: Tensor | None) -> Tensor:
    """`swiglu` without autograd, on operands of one float dtype."""
    if kernels_backend(gate_RF.device) == "triton":
        from core.kernels.triton.swiglu import forward as launch

        return launch(gate_RF, up_RF, weight_R)
    act = F.silu(gate_RF).mul_(up_RF)
    return act if weight_R is None else act.mul_(weight_R[:, None])


def swiglu_backward(
    grad_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, weight_R: Tensor | None, *, out_gate: Tensor, out_up: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The gradients of `swiglu` given that of its result; those of gate and up are written to out_gate and out_up.

    May overwrite grad_RF. Returns the result itself [R, F], made anew because nobody kept it, and the gradient of weight_R [R].
    """
    if kernels_backend(gate_RF.device) == "triton":
        from core.kernels.triton.swiglu import backward as launch

        act = torch.empty_like(gate_RF, memory_format=torch.contiguous_format)
        of_weight = launch(grad_RF, gate_RF, up_RF, weight_R, out_gate=out_gate, out_up=out_up, out_act=act)
        return act, of_weight
    silu = F.silu(gate_RF)
    act, grad_weight = silu * up_RF, None
    if weight_R is not None:
        grad_weight = torch.linalg.vecdot(grad_RF, act)
        act.mul_(weight_R[:, None])
        grad_RF.mul_(weight_R[:, None])
    torch.mul(grad_RF, silu, out=out_up)
    torch.ops.aten.silu_backward.grad_input(grad_RF.mul_(up_RF), gate_RF, grad_input=out_gate)
    return act, grad_weight


class _TritonSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor | None) -> Tensor:
        from core.kernels.triton.swiglu import forward as launch

        ctx.save_for_backward(gate_up, weight)
        gate, up = gate_up.flatten(0, -2).chunk(2, dim=-1)
        return launch(gate, up, weight).view(*gate_up.shape[:-1], gate.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        from core.kernels.triton.swiglu import backward as launch

        gate_up, weight = ctx.saved_tensors
        out = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        (gate, up), (of_gate, of_up) = (x.flatten(0, -2).chunk(2, dim=-1) for x in (gate_up, out))
        grad = grads[0].flatten(0, -2)
        return out, launch(grad, gate, up, weight, out_gate=of_gate, out_up=of_up, out_act=None)
