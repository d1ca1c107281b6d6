"""Matrix products as the layers call them: the operands' dtype in and out, accumulated in float32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.backend import matmul_backend


def linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """x @ weight.T: [T, N] in x's dtype, which both operands share."""
    if matmul_backend(x_TK.dtype, x_TK.device) == "float32":
        return _WidenedLinear.apply(x_TK, weight_NK)
    return F.linear(x_TK, weight_NK)


class _WidenedLinear(torch.autograd.Function):
    """The products of `linear` in float32, each rounded once to the operands' dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x.float() @ weight.float().T).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].float()
        grad_x = (grad @ weight.float()).to(x.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = (grad.T @ x.float()).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight
