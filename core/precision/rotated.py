"""Rows rotated by a random Hadamard matrix and rounded to NVFP4 without being written in between (report section 5.3.4).

A matrix of R rows whose groups lie along S is given as x [R, S] (`along` 1), or as it lies for a weight's gradient, [S, R]
(`along` 0). Torch's form is the definition; Triton's gives its bits where `kernels_backend` chooses it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from core.kernels.backend import kernels_backend
from core.precision.hadamard import POINTS, hadamard

Along = Literal[0, 1]


def rotated(x: Tensor, signs: Tensor, *, along: Along) -> Tensor:
    """The rotated rows [R, S], float32 at least. Raises ValueError where 16 does not divide S."""
    return hadamard(x if along == 1 else x.T.contiguous(), signs)


def rotated_amax(x: Tensor, signs: Tensor, *, along: Along, counts_E: Tensor | None = None) -> Tensor:
    """The largest size in the rotated matrix [1, 1], or in each expert's part of it [E]; float32 at least, zero where it is empty.

    Not finite where something in it is not. counts_E: [E] int64, how many each expert has along x's first dimension, by which x is
    sorted: rows where `along` is 1, and of S where it is 0, in multiples of 16 then, for a group belongs to one expert.
    """
    if _fused(x):
        from core.kernels.triton.hadamard import largest_of_lines

        of_line = largest_of_lines(x, signs, along=along)
    else:
        sizes = rotated(x, signs, along=along).abs()
        of_group = sizes.unflatten(1, (sizes.shape[1] // POINTS, POINTS))
        of_line = _largest(of_group.flatten(1), 1) if along == 1 else _largest(of_group.transpose(0, 1).flatten(1), 1)
    if counts_E is None:
        return _largest(of_line, 0).view(1, 1)
    lines_E = counts_E if along == 1 else counts_E // POINTS
    owner = torch.arange(len(counts_E), device=x.device).repeat_interleave(lines_E, output_size=len(of_line))
    return of_line.new_zeros(len(counts_E)).scatter_reduce(0, owner, of_line, "amax")


def _fused(x: Tensor) -> bool:
    return x.dtype != torch.float64 and kernels_backend(x.device) == "triton"


def _largest(x: Tensor, dimension: int) -> Tensor:
    """amax over a dimension, zero where it has no elements."""
    return x.amax(dimension) if x.numel() else x.sum(dimension)
