"""What stands between the two products of an MLP, times a weight per row, with backwards that recompute (report section 4.3.4).

The first product [R, N * F] holds N = 2 matrices of [R, F] side by side, gate first, or N = 1 where nothing gates.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.config.architecture import Activation, ClampedSwiGLU, GeGLU, SquaredReLU, SwiGLU
from core.kernels.backend import kernels_backend, wide_dtype
from core.kernels.swiglu import swiglu, swiglu_backward, swiglu_forward


def activate_loop(product_RNF: Tensor, activation: Activation, weight_R: Tensor | None = None) -> Tensor:
    """The definition of `activate`, written down as papers do, differentiated by autograd, in any float dtype."""
    if isinstance(activation, SwiGLU):
        return swiglu(product_RNF, weight_R)
    if isinstance(activation, SquaredReLU):
        act = F.relu(product_RNF) ** 2
    else:
        gate, up = product_RNF.chunk(2, dim=-1)
        if isinstance(activation, GeGLU):
            act = F.gelu(gate, approximate=_form_of_gelu(activation)) * up
        else:
            gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
            act = (up + activation.shift) * gate * torch.sigmoid(activation.alpha * gate)
    return act if weight_R is None else act * weight_R.to(act.dtype)[:, None]


def activate(product_RNF: Tensor, activation: Activation, weight_R: Tensor | None = None) -> Tensor:
    """The activation times weight_R [R] where given: [R, F] in the product's dtype, which of 16-bit floats alone is rounded.

    Kept for the backward is the product, from which the activation is made again.
    """
    if isinstance(activation, SwiGLU):
        return swiglu(product_RNF, weight_R)
    return _Activate.apply(product_RNF, weight_R, activation)


def activate_forward(product_RNF: Tensor, activation: Activation, weight_R: Tensor | None) -> Tensor:
    """`activate` without autograd, on operands of one float dtype."""
    match activation:
        case SwiGLU():
            gate, up = product_RNF.chunk(2, dim=1)
            return swiglu_forward(gate, up, weight_R)
        case GeGLU():
            gate, up = product_RNF.chunk(2, dim=1)
            act = F.gelu(gate, approximate=_form_of_gelu(activation)).mul_(up)
        case ClampedSwiGLU():
            gate, up = _clamped(product_RNF, activation)
            act = torch.sigmoid(gate * activation.alpha).mul_(gate).mul_(up.add_(activation.shift))
        case SquaredReLU():
            act = F.relu(product_RNF).square_()
    return act if weight_R is None else act.mul_(weight_R[:, None])


def activate_backward(
    grad_RF: Tensor, product_RNF: Tensor, activation: Activation, weight_R: Tensor | None, *, out: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The gradients of `activate` given that of its result; the product's is written to `out`. Operands of one float dtype.

    Overwrites grad_RF. Returns the result itself [R, F], made anew because nobody kept it, and the gradient of weight_R [R].
    """
    if isinstance(activation, SwiGLU):
        (gate, up), (out_gate, out_up) = product_RNF.chunk(2, dim=1), out.chunk(2, dim=1)
        return swiglu_backward(grad_RF, gate, up, weight_R, out_gate=out_gate, out_up=out_up)
    act = activate_forward(product_RNF, activation, None)
    grad_weight = None
    if weight_R is not None:
        grad_weight = torch.linalg.vecdot(grad_RF, act)
        act.mul_(weight_R[:, None])
        grad_RF.mul_(weight_R[:, None])
    if isinstance(activation, SquaredReLU):
        torch.mul(grad_RF, F.relu(product_RNF).mul_(2), out=out)
    elif isinstance(activation, GeGLU):
        _geglu_backward(grad_RF, product_RNF, activation, out)
    else:
        _clamped_backward(grad_RF, product_RNF, activation, out)
    return act, grad_weight


def _geglu_backward(grad_RF: Tensor, product_RNF: Tensor, activation: GeGLU, out: Tensor) -> None:
    form = _form_of_gelu(activation)
    (gate, up), (out_gate, out_up) = product_RNF.chunk(2, dim=1), out.chunk(2, dim=1)
    torch.mul(grad_RF, F.gelu(gate, approximate=form), out=out_up)
    torch.ops.aten.gelu_backward.grad_input(grad_RF.mul_(up), gate, approximate=form, grad_input=out_gate)


def _clamped_backward(grad_RF: Tensor, product_RNF: Tensor, activation: ClampedSwiGLU, out: Tensor) -> None:
    """A clamped number passes gradients up to and at its limit, as torch's clamp does."""
    (raw_gate, raw_up), (out_gate, out_up) = product_RNF.chunk(2, dim=1), out.chunk(2, dim=1)
    gate, up = _clamped(product_RNF, activation)
    gated = torch.sigmoid(gate * activation.alpha)
    torch.mul(grad_RF, gate * gated, out=out_up)
    out_up.masked_fill_(raw_up.abs() > activation.limit, 0)
    # d (g sigmoid(a g)) / dg = sigmoid(a g) (1 + a g (1 - sigmoid(a g)))
    slope = gate.mul_(activation.alpha).mul_(1 - gated).add_(1).mul_(gated)
    torch.mul(grad_RF.mul_(up.add_(activation.shift)), slope, out=out_gate)
    out_gate.masked_fill_(raw_gate > activation.limit, 0)


def _clamped(product_RNF: Tensor, activation: ClampedSwiGLU) -> tuple[Tensor, Tensor]:
    """Gate and up within the limits, in memory of their own."""
    gate, up = product_RNF.chunk(2, dim=1)
    return gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)


def _form_of_gelu(activation: GeGLU) -> str:
    return "tanh" if activation.tanh else "none"


def rounded_forward(product_RNF: Tensor, activation: Activation, weight_R: Tensor | None) -> Tensor:
    """`activate` without autograd, element by element in float32 at least and rounded once to the product's dtype."""
    if isinstance(activation, SwiGLU) and kernels_backend(product_RNF.device) == "triton":
        # The kernel does so itself, in one pass.
        gate, up = product_RNF.chunk(2, dim=1)
        return swiglu_forward(gate, up, weight_R)
    wide = wide_dtype(product_RNF.dtype)
    weight = None if weight_R is None else weight_R.to(wide)
    return activate_forward(product_RNF.to(wide), activation, weight).to(product_RNF.dtype)


def rounded_backward(
    grad_RF: Tensor, product_RNF: Tensor, activation: Activation, weight_R: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The product's gradient, the activation made anew, and the gradient of weight_R, each rounded once to its operand's dtype.

    Leaves grad_RF as it is.
    """
    if isinstance(activation, SwiGLU) and kernels_backend(product_RNF.device) == "triton":
        # Unlike torch's form, the kernel writes nothing but its results.
        out = torch.empty_like(product_RNF)
        act, of_weight = activate_backward(grad_RF, product_RNF, activation, weight_R, out=out)
        return out, act, of_weight
    wide = wide_dtype(product_RNF.dtype)
    weight = None if weight_R is None else weight_R.to(wide)
    of_product = torch.empty_like(product_RNF, dtype=wide)
    grad = grad_RF.to(wide, copy=True)
    act, of_weight = activate_backward(grad, product_RNF.to(wide), activation, weight, out=of_product)
    if of_weight is not None and weight_R is not None:
        of_weight = of_weight.to(weight_R.dtype)
    return of_product.to(product_RNF.dtype), act.to(product_RNF.dtype), of_weight


class _Activate(torch.autograd.Function):
    """`activate` that keeps only the product and the weight."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, weight_R: Tensor | None, activation: Activation) -> Tensor:
        ctx.save_for_backward(product, weight_R)
        ctx.activation = activation
        return rounded_forward(product, activation, weight_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        product, weight_R = ctx.saved_tensors
        of_product, _, of_weight = rounded_backward(grads[0], product, ctx.activation, weight_R)
        return of_product, of_weight, None
