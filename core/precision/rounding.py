"""The noise of stochastic rounding, which depends on (seed, name, global index, step) only: the same bits under every mapping."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from core.state.box import Box
from core.state.seed import uniform, uniform_rows

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): 2^64 over the golden ratio, and two steps of shift and product; as signed numbers.
_GOLDEN = -0x61C8864680B583EB
_MIXING = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))
_LAST_SHIFT = 31


def rounding_noise(seed: int, name: str, box: Box, *, step: int, device: torch.device | None = None) -> Tensor:
    """The piece `box` of the noise of a tensor: uniform in (0, 1), multiples of 2^-33, float64 on `device` (None: CPU).

    name: canonical name of the tensor, and which of its casts this is where there are several; copies that are rounded apart
    (row-wise and column-wise) need names of their own, or their errors are the same.
    """
    return uniform(seed, _stream(name), box, step=step, device=device)


def rounding_noise_rows(seed: int, name: str, rows_N: Tensor, columns: int, *, step: int) -> Tensor:
    """The whole rows `rows_N` of that noise (int64 places in the global batch, any order): [N, columns] on their device."""
    return uniform_rows(seed, _stream(name), rows_N, columns, step=step)


def content_noise(seed: int, name: str, x: Tensor) -> Tensor:
    """Noise for rows that have no place of their own, as rows on their way through experts: [..., R, C] as x, float64, on its device.

    A row's numbers follow from its own bits and the column: the same whichever rank holds it, and in whatever order. Rows of equal bits
    have equal noise; other rows' is independent. Nothing needs to be sent beside the rows, and a second run of a forward draws alike.
    """
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return uniform_rows(seed, _stream(name), row_keys(rows), x.shape[-1]).view(x.shape)


def row_keys(x_RC: Tensor) -> Tensor:
    """A number for the bits of each row: [R] int64, the sum of all elements' bits times their columns' factors, which wraps."""
    bits = x_RC.contiguous().view(_INTEGERS[x_RC.dtype.itemsize]).to(torch.int64)
    return (bits * column_factors(x_RC.shape[1], x_RC.device)).sum(1)


def column_factors(columns: int, device: torch.device) -> Tensor:
    """The factor of every column in `row_keys`: [C] int64, odd, and as random numbers are (multilinear hashing).

    Multiples of one number would not do: changes of several elements, as a swap of neighbours, would cancel alike in many rows.
    """
    z = torch.arange(1, columns + 1, dtype=torch.int64, device=device) * _GOLDEN
    for shift, factor in _MIXING:
        z = (z ^ _shifted(z, shift)) * factor
    return (z ^ _shifted(z, _LAST_SHIFT)) | 1


def _shifted(z: Tensor, by: int) -> Tensor:
    """Of 64 bits without a sign; int64 would move its sign in."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _stream(name: str) -> str:
    """A stream apart from the one that drew the initial weights of the same name, which also begins at step 0."""
    return f"{name}:rounding"
