"""Weights that are held in low precision alone: nothing is kept of them in the run's dtype (report section 5.3.5).

They are rounded from their float32 masters, of which each rank has a stretch of the flat weight: what follows measures and rounds such a
stretch, wherever in a row or a block it begins and ends. All stretches together are `quantise` of the whole master, bit by bit. Weights
that are not primary are rounded from the run's dtype, so from numbers that were rounded once before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from core.precision.elements import encode, pack
from core.precision.formats import (
    NVFP4,
    Format,
    PerTensor,
    Quantised,
    block_amax_of,
    block_of,
    element_of,
    given_amax,
    scaled,
    scales_for,
)
from core.precision.scales import Scales

# Elements that are rounded at once, in a few temporary copies.
_PIECE = 1 << 20


@dataclass(kw_only=True, eq=False)
class PrimaryWeight:
    """A weight [..., N, K] as its products read it: rows along K, and columns, the transpose, along N.

    columns: None where the transpose has the same scales; it is then made of the rows for every product that reads it, and no second
    copy is kept. amax: what was measured of each matrix, [..., 1, 1], where that is the scale's.
    """

    rows: Quantised
    columns: Quantised | None = None
    amax: Tensor | None = None

    def get(self, *, transposed: bool) -> Quantised:
        """What the forward reads, or what the input gradient does."""
        if not transposed:
            return self.rows
        return self.rows.transposed() if self.columns is None else self.columns

    @property
    def num_bytes(self) -> int:
        """What is held of the weight, scales included."""
        return self.rows.num_bytes + (0 if self.columns is None else self.columns.num_bytes)


def measured(part: Tensor, start: int, format: Format, shape: tuple[int, ...]) -> Tensor:
    """What the elements [start, start + n) of a weight of `shape` [..., N, K] add to the largest sizes of its blocks, float32 on their grid.

    part: [n]. Zero for blocks without any of them; infinite where one is not finite.
    """
    block = block_of(format, shape)
    down, right = _grid(shape, block)
    found = torch.zeros(math.prod(shape[:-2]) * down, right, device=part.device)
    for stretch in _stretches(part, start, shape[-1]):
        sizes = block_amax_of(stretch.rows, (1, block[1])).float().nan_to_num(nan=math.inf, posinf=math.inf)
        places = stretch.grid_rows(shape[-2], block[0])
        found.scatter_reduce_(0, places[:, None].expand_as(sizes), sizes, "amax")
    return found.view(*shape[:-2], down, right)


def tensor_amax(grid: Tensor, format: Format) -> Tensor | None:
    """The largest of each matrix [..., 1, 1], of a format whose scales depend on it."""
    return grid.amax((-2, -1), keepdim=True) if isinstance(format, PerTensor | NVFP4) else None


def scales_of(grid: Tensor, amax: Tensor | None, expected: Tensor | None, format: Format) -> Scales:
    """The scales by what was measured of a whole weight. expected: what delayed scaling takes for `amax`."""
    if amax is None:
        return scales_for(format, grid, None)
    return scales_for(format, grid, given_amax(amax if expected is None else expected, amax))


def rounded(part: Tensor, start: int, scales: Scales, format: Format, shape: tuple[int, ...]) -> Tensor:
    """The codes of the elements [start, start + n) as they are stored: [n] uint8, of four bits two to a byte [n / 2].

    Raises ValueError where two elements of one byte lie on different sides of an end of the stretch, or of a row.
    """
    element, block = element_of(format), block_of(format, shape)
    if element.bits == 4 and (start % 2 or part.numel() % 2 or shape[-1] % 2):
        raise ValueError(f"elements {start} to {start + part.numel()} of rows of {shape[-1]} are no whole bytes")
    factors = scales.factor.reshape(-1, scales.factor.shape[-1])
    out = torch.empty(part.numel() * element.bits // 8, dtype=torch.uint8, device=part.device)
    for stretch in _stretches(part, start, shape[-1]):
        factor = factors[stretch.grid_rows(shape[-2], block[0])]
        codes = encode(scaled(stretch.rows, factor, (1, block[1])), element)
        codes = codes.flatten()[stretch.column : stretch.column + stretch.count]
        bytes_ = pack(codes) if element.bits == 4 else codes
        at = stretch.place * element.bits // 8
        out[at : at + bytes_.numel()] = bytes_
    return out


@dataclass(frozen=True, kw_only=True, eq=False)
class _Stretch:
    """`count` elements from the place `place` of a part on, as whole rows [r, K] from `row` on: zeros fill the only one that is cut."""

    rows: Tensor
    row: int
    column: int
    place: int
    count: int

    def grid_rows(self, matrix_rows: int, height: int) -> Tensor:
        """In which row of the grid of blocks each row lies [r], matrices of `matrix_rows` rows one below the other."""
        rows = torch.arange(self.row, self.row + len(self.rows), device=self.rows.device)
        return rows // matrix_rows * -(-matrix_rows // height) + rows % matrix_rows // height


def _stretches(part: Tensor, start: int, columns: int) -> Iterator[_Stretch]:
    """A cut row, whole rows some at a time, and another cut row."""
    place = 0
    while place < part.numel():
        row, column = divmod(start + place, columns)
        left = part.numel() - place
        if column or left < columns:
            count = min(columns - column, left)
            rows = part.new_zeros(1, columns)
            rows[0, column : column + count] = part[place : place + count]
        else:
            count = min(left // columns, max(1, _PIECE // columns)) * columns
            rows = part[place : place + count].view(-1, columns)
        yield _Stretch(rows=rows, row=row, column=column, place=place, count=count)
        place += count


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[-2] // block[0]), -(-shape[-1] // block[1])
