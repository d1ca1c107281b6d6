"""RMSNorm (arXiv 1910.07467), statistics in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from core.config.architecture import RMSNorm as RMSNormConfig
from core.kernels.backend import wide_dtype
from core.layers.place import Place
from core.state.box import whole
from core.state.spec import Constant, TensorSpec


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, config: RMSNormConfig, size: int, *, place: Place) -> None:
        super().__init__()
        self.weight = nn.Parameter(place.empty(size))
        self.eps = config.eps
        # Whole on every rank of tp, each of which applies it to other tokens, or to other heads.
        self.adjacent = place.groups.tp.size

    def specs(self) -> dict[str, TensorSpec]:
        """The gain's declaration: starts at 1, without weight decay."""
        shape = tuple(self.weight.shape)
        ones = Constant(value=1.0)
        spec = TensorSpec(
            shape=shape, box=whole(shape), replicas="dense", init=ones, adjacent=self.adjacent, decay=False
        )
        return {"weight": spec}

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size] in x's dtype."""
        return _RMSNorm.apply(x, self.weight, self.eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The definition, differentiated by autograd; float64 stays float64."""
    wide = x.to(wide_dtype(x.dtype))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.to(x.dtype) * weight).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """`rms_norm_reference` that keeps its input and one number a row, and passes over memory seldom."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(wide_dtype(x.dtype))
        scale = torch.rsqrt(torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps))[..., None]
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        wide = x.to(wide_dtype(x.dtype))
        grad = grads[0].to(wide.dtype)
        size = x.shape[-1]
        normed = wide * scale
        grad_weight = (grad * normed).reshape(-1, size).sum(0)
        scaled = grad * weight.to(grad.dtype)
        mean = torch.linalg.vecdot(scaled, normed)[..., None].div_(size)
        grad_x = torch.addcmul(scaled, normed, mean, value=-1.0).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None
