"""Quantising by kernels, where a device has them: the same bits as the definitions in formats.py and grouped.py, from fewer reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from core.errors import ConfigError
from core.kernels.backend import kernels_backend
from core.kernels.casts import Cast
from core.precision.bands import matrices
from core.precision.elements import check_noise

if TYPE_CHECKING:
    from core.kernels.triton.amax import TensorScales
    from core.kernels.triton.quantise import Copy

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
# Of a tile that one program holds.
_LARGEST_BLOCK = 128


class Made(NamedTuple):
    """data: codes as uint8, two to a byte where they have four bits. scales: float32, or bits in uint8. tensor_scale: of nvfp4."""

    data: Tensor
    scales: Tensor
    tensor_scale: Tensor | None


def runs_kernels(x: Tensor, how: Cast) -> bool:
    """Whether kernels quantise this tensor: not float64, nor what holds no numbers, nor blocks that do not fill a tile."""
    sides = all(side <= _LARGEST_BLOCK and side & (side - 1) == 0 for side in how.block)
    if x.is_meta or x.dtype not in _NARROW or not (how.block[0] == 1 or how.symmetric) or not sides:
        return False
    try:
        return kernels_backend(x.device) == "triton"
    except ConfigError:
        # What a run on a GPU rounds on the host, as the trial of a quantiser does, needs no kernels.
        if x.device.type == "cpu":
            return False
        raise


def cast(x: Tensor, how: Cast, *, amax: Tensor | None, noise: Tensor | None) -> Made:
    """x [..., R, C], each matrix by itself. amax: of each [..., 1, 1], or one. noise: of x's shape."""
    from core.kernels.triton import amax as scales
    from core.kernels.triton import quantise as kernel

    flat = matrices(x)
    tensor = scales.of_matrices(flat, how, _given(amax))
    rows, _ = kernel.cast(flat, how, tensor, rows=True, turned=False, noise=_noise(noise, x))
    return _shaped(rows, how, tensor, x.shape[:-2])


def cast_both(
    x: Tensor, how: Cast, *, amax: Tensor | None, noise: Tensor | None, turned_noise: Tensor | None
) -> tuple[Made, Made]:
    """x [..., R, C] and its transposed copy [..., C, R], from one read. turned_noise: of its shape, where the copies are rounded apart."""
    from core.kernels.triton import amax as scales
    from core.kernels.triton import quantise as kernel

    flat, front = matrices(x), x.shape[:-2]
    tensor = scales.of_matrices(flat, how, _given(amax))
    apart = None if how.symmetric else _noise(turned_noise, x.mT)
    rows, turned = kernel.cast(flat, how, tensor, rows=True, turned=True, noise=_noise(noise, x), turned_noise=apart)
    return _shaped(rows, how, tensor, front), _shaped(turned, how, tensor, front)


def cast_grouped(
    x_RC: Tensor, counts_E: Tensor, how: Cast, *, turned: bool, amax_E: Tensor | None, noise: Tensor | None
) -> Made:
    """Rows sorted by expert, [R, C], or `turned`, [C, R]. The host waits for nothing.

    noise: of the shape of what comes out. Scales are [E] where there is one for an expert.
    """
    from core.kernels.triton import amax as scales
    from core.kernels.triton import quantise as kernel

    tensor = scales.of_experts(x_RC, counts_E, how, _given(amax_E))
    noise = _noise(noise, x_RC.T if turned else x_RC)
    one, other = (None, noise) if turned else (noise, None)
    copies = kernel.cast(x_RC.unsqueeze(0), how, tensor, rows=not turned, turned=turned, noise=one, turned_noise=other)
    data, grid, _ = _shaped(copies[turned], how, None, torch.Size())
    unit = None if tensor is None else tensor.stored_N
    return Made(data, unit, None) if how.kind == "tensor" and unit is not None else Made(data, grid, unit)


def _shaped(copy: Copy | None, how: Cast, tensor: TensorScales | None, front: torch.Size) -> Made:
    assert copy is not None, "this copy was asked for"
    unit = None if tensor is None else tensor.stored_N.view(*front, 1, 1)
    data, scales = (one.view(*front, *one.shape[1:]) for one in copy)
    return Made(data, unit, None) if how.kind == "tensor" and unit is not None else Made(data, scales, unit)


def _given(amax: Tensor | None) -> Tensor | None:
    return None if amax is None else amax.float().reshape(-1)


def _noise(noise: Tensor | None, x: Tensor) -> Tensor | None:
    """As [matrices, ...]. Raises ValueError for another shape than x's."""
    if noise is None:
        return None
    check_noise(noise, x.shape)
    return matrices(noise)
