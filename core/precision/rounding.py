"""The noise of stochastic rounding, which depends on (seed, name, global index, step) only: the same bits under every mapping."""

from __future__ import annotations

from torch import Tensor

from core.state.box import Box
from core.state.seed import uniform, uniform_rows


def rounding_noise(seed: int, name: str, box: Box, *, step: int) -> Tensor:
    """The piece `box` of the noise of a tensor: uniform in (0, 1), multiples of 2^-33, float64 on the CPU.

    name: canonical name of the tensor, and which of its casts this is where there are several; copies that are rounded apart
    (row-wise and column-wise) need names of their own, or their errors are the same.
    """
    return uniform(seed, _stream(name), box, step=step)


def rounding_noise_rows(seed: int, name: str, rows_N: Tensor, columns: int, *, step: int) -> Tensor:
    """The whole rows `rows_N` of that noise (int64 places in the global batch, any order): [N, columns] on their device."""
    return uniform_rows(seed, _stream(name), rows_N, columns, step=step)


def _stream(name: str) -> str:
    """A stream apart from the one that drew the initial weights of the same name, which also begins at step 0."""
    return f"{name}:rounding"
