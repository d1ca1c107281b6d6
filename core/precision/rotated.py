"""Rows rotated by a random Hadamard matrix and rounded to NVFP4 without being written in between (report section 5.3.4).

A matrix of R rows whose groups lie along S is given as x [R, S] (`along` 1), or as it lies for a weight's gradient, [S, R]
(`along` 0). Torch's form is the definition; Triton's gives its bits where `kernels_backend` chooses it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from core.kernels.backend import kernels_backend
from core.precision.elements import E2M1, E4M3
from core.precision.formats import NVFP4_ROWS, Quantised, quantise
from core.precision.grouped import Grouped, largest_of_experts, quantise_grouped_columns
from core.precision.hadamard import POINTS, hadamard
from core.precision.scales import float32_scales

Along = Literal[0, 1]


def fuses(x: Tensor) -> bool:
    """Whether kernels rotate and round this tensor in one pass: a matrix of float32 or narrower."""
    return x.dim() == 2 and x.dtype != torch.float64 and not x.is_meta and kernels_backend(x.device) == "triton"


def rotated(x: Tensor, signs: Tensor, *, along: Along) -> Tensor:
    """The rotated rows [R, S], float32 at least. Raises ValueError where 16 does not divide S."""
    if fuses(x):
        from core.kernels.triton.hadamard import rotate_lines

        return rotate_lines(x, signs, along=along)
    return hadamard(x if along == 1 else x.T.contiguous(), signs)


def rotated_amax(x: Tensor, signs: Tensor, *, along: Along, counts_E: Tensor | None = None) -> Tensor:
    """The largest size in the rotated matrix [1, 1], or in each expert's part of it [E]; float32 at least, zero where it is empty.

    Not finite where something in it is not. counts_E: [E] int64, how many each expert has along x's first dimension, by which x is
    sorted: rows where `along` is 1, and of S where it is 0, in multiples of 16 then, for a group belongs to one expert.
    """
    if fuses(x):
        from core.kernels.triton.hadamard import largest_of_lines

        of_line = largest_of_lines(x, signs, along=along)
    else:
        sizes = rotated(x, signs, along=along).abs()
        of_group = sizes.unflatten(1, (sizes.shape[1] // POINTS, POINTS))
        of_line = _largest(of_group.flatten(1), 1) if along == 1 else _largest(of_group.transpose(0, 1).flatten(1), 1)
    if counts_E is None:
        return _largest(of_line, 0).view(1, 1)
    lines_E = counts_E if along == 1 else counts_E // POINTS
    return largest_of_experts(of_line, lines_E)


def quantise_rotated(
    x: Tensor, signs: Tensor, *, along: Along, amax: Tensor | None = None, noise: Tensor | None = None
) -> Quantised:
    """The rotated rows [R, S] in NVFP4, as `quantise` makes it of them.

    amax: [1, 1], of `rotated_amax` and of other ranks perhaps, which is measured first where it is missing. noise: [R, S], see `encode`.
    Raises ValueError where 16 does not divide S.
    """
    if not fuses(x):
        return quantise(rotated(x, signs, along=along), NVFP4_ROWS, amax=amax, noise=noise)
    from core.kernels.triton.hadamard import quantise_lines

    amax = rotated_amax(x, signs, along=along) if amax is None else amax.float()
    codes, scales = quantise_lines(x, signs, amax, along=along, noise=noise)
    return Quantised(
        data=codes,
        scales=scales.view(E4M3.dtype),
        tensor_scale=_tensor_scale(amax).view(1, 1),
        format=NVFP4_ROWS,
        shape=(x.shape[1 - along], x.shape[along]),
    )


def quantise_rotated_columns(
    x_SR: Tensor,
    counts_E: Tensor,
    signs: Tensor,
    *,
    amax_E: Tensor | None = None,
    noise: Tensor | None = None,
) -> Grouped:
    """Rows sorted by expert, [S, R], transposed and rotated along S in NVFP4: [R, S], as `quantise_grouped_columns` makes it.

    counts_E: [E] int64, multiples of 16 that sum to S. amax_E: [E], of `rotated_amax` with along=0, which is measured first where it is
    missing. noise: [R, S]. Raises ValueError for other counts, but not for such that lie on a GPU, for which the host would have to wait.
    """
    if counts_E.device.type == "cpu":
        _check(counts_E, x_SR.shape[0])
    if not fuses(x_SR):
        turned = rotated(x_SR, signs, along=0)
        return quantise_grouped_columns(turned.T, counts_E, NVFP4_ROWS, amax_E=amax_E, noise=noise)
    from core.kernels.triton.hadamard import quantise_lines

    amax_E = rotated_amax(x_SR, signs, along=0, counts_E=counts_E) if amax_E is None else amax_E.float()
    of_group = amax_E.repeat_interleave(counts_E // POINTS, output_size=x_SR.shape[0] // POINTS)
    codes, scales = quantise_lines(x_SR, signs, of_group, along=0, noise=noise)
    return Grouped(
        data=codes,
        scales=scales.view(E4M3.dtype),
        tensor_scale_E=_tensor_scale(amax_E),
        counts_E=counts_E,
        axis=1,
        format=NVFP4_ROWS,
        shape=(x_SR.shape[1], x_SR.shape[0]),
    )


def _check(counts_E: Tensor, summed: int) -> None:
    """Raises ValueError for counts that do not cover S in whole groups."""
    if int(counts_E.sum()) != summed or (counts_E % POINTS).any():
        raise ValueError(
            f"the experts' counts must be multiples of {POINTS} that sum to {summed}, not {counts_E.tolist()}: "
            "fill up with zeros"
        )


def _tensor_scale(amax: Tensor) -> Tensor:
    return float32_scales(amax, E2M1.largest * E4M3.largest).stored


def _largest(x: Tensor, dimension: int) -> Tensor:
    """amax over a dimension, zero where it has no elements."""
    return x.amax(dimension) if x.numel() else x.sum(dimension)
