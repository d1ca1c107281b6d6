"""Large matrices on a CPU, a few rows at a time: what an operation needs in between then stays in the processor's cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

# Few enough for the cache, enough that starting an operation on them costs little beside it.
_NUMBERS = 1 << 17
# Below that many the whole is done at once.
_WORTH = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Band:
    """Rows of one matrix of a stack, and the lines of the grid of blocks that they are. block: as in these rows alone."""

    matrix: int
    rows: slice
    lines: slice
    block: tuple[int, int]


def bands_of(shape: tuple[int, ...], block: tuple[int, int], device: torch.device) -> list[Band]:
    """The bands of a stack [..., R, C] that is worth it, whole blocks each, or rows of one block that is as high as R; or none."""
    *front, rows, columns = shape
    if device.type != "cpu" or prod(shape) < _WORTH:
        return []
    whole = block[0] >= rows
    each = max(1, _NUMBERS // columns)
    if not whole:
        each = max(1, each // block[0]) * block[0]
    bands = []
    for matrix in range(prod(front)):
        for start in range(0, rows, each):
            end = min(rows, start + each)
            lines = slice(0, 1) if whole else slice(start // block[0], -(-end // block[0]))
            bands.append(
                Band(
                    matrix=matrix,
                    rows=slice(start, end),
                    lines=lines,
                    block=(end - start if whole else block[0], block[1]),
                )
            )
    return bands


def each_band(bands: list[Band], action: Callable[[Band], Tensor]) -> list[Tensor]:
    """What an action makes of every band, in order."""
    return [action(band) for band in bands]


def matrices(x: Tensor) -> Tensor:
    """A stack [..., R, C] as [matrices, R, C], without its gradient."""
    return x.detach().reshape(prod(x.shape[:-2]), *x.shape[-2:])
