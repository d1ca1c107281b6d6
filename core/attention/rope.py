"""Rotary position embedding, plain and stretched by YaRN, in both pairings of dimensions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.config.architecture import GQA, Attention, Rope, Yarn
from core.kernels.backend import wide_dtype


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """The angles of a batch's tokens: cos and sin [T, rotated / 2] float32."""

    cos: Tensor
    sin: Tensor


def yarn_scale(factor: float, mscale: float) -> float:
    """m(s) = 0.1 * s * ln(factor) + 1 (arXiv 2309.00071, section 3.4, as DeepSeek parametrises it)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def rotated_dimensions(attention: Attention) -> int:
    """How many dimensions of a head the rotation turns."""
    return attention.head_dim if isinstance(attention, GQA) else attention.rope_dim


def softmax_scale(head_dim: int, rope: Rope | Yarn) -> float:
    """The factor on attention logits: head_dim ** -0.5, times YaRN's m(mscale_all_dim) ** 2."""
    scale = head_dim**-0.5
    if isinstance(rope, Yarn):
        scale *= yarn_scale(rope.factor, rope.mscale_all_dim) ** 2
    return scale


def frequencies(rope: Rope | Yarn, rotated: int) -> Tensor:
    """Radians per position of each pair of dimensions: [rotated / 2] float32 on the CPU."""
    base = rope.theta ** (torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated)
    plain = 1.0 / base
    if isinstance(rope, Rope):
        return plain
    low, high = (_yarn_dimension(turns, rotated, rope) for turns in (rope.beta_fast, rope.beta_slow))
    low, high = max(math.floor(low), 0), min(math.ceil(high), rotated - 1)
    ramp = (torch.arange(rotated // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1.0 - ramp.clamp(0.0, 1.0)
    return plain / rope.factor * (1.0 - keep) + plain * keep


def rotation(rope: Rope | Yarn, rotated: int, positions_T: Tensor) -> Rotation:
    """The angles at the given positions, scaled by YaRN's m(mscale) / m(mscale_all_dim)."""
    angles = positions_T.float()[:, None] * frequencies(rope, rotated).to(positions_T.device)[None, :]
    scale = 1.0
    if isinstance(rope, Yarn):
        scale = yarn_scale(rope.factor, rope.mscale) / yarn_scale(rope.factor, rope.mscale_all_dim)
    return Rotation(cos=angles.cos() * scale, sin=angles.sin() * scale)


def rotate_halves(x_TAD: Tensor, turn: Rotation) -> Tensor:
    """x [T, heads, D] with dimension i paired with i + D / 2 (GPT-NeoX's form)."""
    return _Rotate.apply(x_TAD, turn.cos[:, None, :], turn.sin[:, None, :], False)


def rotate_neighbours(x_TAD: Tensor, turn: Rotation) -> Tensor:
    """x [T, heads, D] with dimension 2i paired with 2i + 1 (DeepSeek's published form)."""
    return _Rotate.apply(x_TAD, turn.cos[:, None, :], turn.sin[:, None, :], True)


def _yarn_dimension(turns: float, rotated: int, rope: Yarn) -> float:
    """The dimension whose wave makes `turns` turns over the trained length."""
    return rotated * math.log(rope.trained_tokens / (turns * 2.0 * math.pi)) / (2.0 * math.log(rope.theta))


class _Rotate(torch.autograd.Function):
    """A rotation is orthogonal up to its scale: the gradient turns back by the same angles. Nothing of x is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.neighbours = neighbours
        return _turn(x, cos, sin, neighbours)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos, -sin, ctx.neighbours), None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    """x turned by the angles, computed in float32 (float64 for float64), in x's dtype."""
    wide = x.to(wide_dtype(x.dtype))
    half = x.shape[-1] // 2
    first, second = (wide[..., 0::2], wide[..., 1::2]) if neighbours else (wide[..., :half], wide[..., half:])
    out = torch.empty(wide.shape, dtype=wide.dtype, device=wide.device)
    out_first, out_second = (out[..., 0::2], out[..., 1::2]) if neighbours else (out[..., :half], out[..., half:])
    out_first.copy_(first * cos - second * sin)
    out_second.copy_(second * cos + first * sin)
    return out.to(x.dtype)
