"""Matrix products as the layers call them: the operands' dtype in and out, accumulated in float32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.kernels.backend import matmul_backend
from core.kernels.deferred import Deferred


def linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """x @ weight.T: [T, N] in x's dtype, which both operands share."""
    if matmul_backend(x_TK.dtype, x_TK.device) == "float32":
        return _WidenedLinear.apply(x_TK, weight_NK)
    return F.linear(x_TK, weight_NK)


def deferring_linear(x_TK: Tensor, weight: nn.Parameter, later: Deferred) -> Tensor:
    """`linear` whose weight gradient can be put off; weight: a parameter of [N, K], or of [2, N / 2, K] as its flat rows."""
    return _DeferringLinear.apply(x_TK, weight, later)


def wide_linear(x_TK: Tensor, weight_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """x @ weight.T with operands, sum and result in a wider dtype: [T, N]. Kept is x as it is, not its wider copy."""
    if x_TK.dtype == weight_NK.dtype == dtype:
        return F.linear(x_TK, weight_NK)
    return _WideLinear.apply(x_TK, weight_NK, dtype)


class _WideLinear(torch.autograd.Function):
    """The product of wider copies, which are made again for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.to(dtype), weight.to(dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, weight), grad = ctx.saved_tensors, grads[0]
        grad_x = (grad @ weight.to(grad.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = (grad.T @ x.to(grad.dtype)).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


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


class _DeferringLinear(torch.autograd.Function):
    """The products of `linear`, the weight's gradient apart from the input's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, later: Deferred) -> Tensor:
        ctx.save_for_backward(x)
        # The parameter itself, not what autograd saves of it: a gradient that comes later is added to it by hand.
        ctx.weight, ctx.later = weight, later
        return linear(x, _rows(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        weight, grad = ctx.weight, grads[0]
        grad_x = linear(grad, _rows(weight).T) if ctx.needs_input_grad[0] else None

        def of_weight() -> Tensor:
            return linear(grad.T, x.T).view(weight.shape)

        if ctx.later.collecting:
            ctx.later.put(weight, of_weight)
            return grad_x, None, None
        return grad_x, of_weight(), None


def _rows(weight: Tensor) -> Tensor:
    return weight.detach().reshape(-1, weight.shape[-1])
