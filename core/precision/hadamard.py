"""Random Hadamard transform of 16 points, which spreads outliers over their neighbours (report 5.3.4; arXiv 2509.25149)."""

from __future__ import annotations

import torch
from torch import Tensor

from core.state.box import whole
from core.state.seed import uniform

POINTS = 16
_STAGES = 4
_NORM = 0.25  # 1 / sqrt(16), exact


def hadamard_signs(seed: int, name: str, *, step: int = 0) -> Tensor:
    """Sixteen random signs, [16] float32 of ±1 on the CPU, from (seed, name, step); all groups of a tensor share them."""
    return torch.where(uniform(seed, f"{name}:hadamard", whole((POINTS,)), step=step) < 0.5, -1.0, 1.0)


def hadamard(x: Tensor, signs: Tensor) -> Tensor:
    """Each group of 16 neighbours along the last dimension times diag(signs) · H / 4: x's shape, at least float32.

    H is Sylvester's matrix: ±1, symmetric, H·H = 16. Orthogonal, so that a product over this dimension is unchanged where both
    operands are transformed. Additions run in the order of four butterflies, which fixes the bits on every device. Raises
    ValueError where 16 does not divide the last dimension: zeros that fill a group would become other than zeros.
    """
    return _butterflies(_groups(x) * signs.to(x.device)).flatten(-2)


def inverse_hadamard(y: Tensor, signs: Tensor) -> Tensor:
    """The x that `hadamard` makes y of; exact wherever its sums are, as in float64 of numbers that were bfloat16."""
    return (_butterflies(_groups(y)) * signs.to(y.device)).flatten(-2)


def _groups(x: Tensor) -> Tensor:
    if x.shape[-1] % POINTS:
        raise ValueError(
            f"a Hadamard transform of {POINTS} points needs a last dimension that {POINTS} divides: {x.shape}"
        )
    wide = x if x.dtype == torch.float64 else x.float()
    return wide.unflatten(-1, (x.shape[-1] // POINTS, POINTS))


def _butterflies(x: Tensor) -> Tensor:
    """x · H / 4 along the last dimension, of 16 points."""
    for stage in range(_STAGES):
        pairs = x.unflatten(-1, (-1, 2, 1 << stage))
        first, second = pairs.unbind(-2)
        x = torch.stack((first + second, first - second), dim=-2).flatten(-3)
    return x * _NORM
