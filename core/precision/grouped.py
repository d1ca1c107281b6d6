"""Rows of all experts quantised at once, each expert's as if they were alone: with its own scale, and NVFP4's amax of its own.

Rows come sorted by expert, with the count of each. Weights [experts, out, in] need none of this: `quantise` takes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from core.kernels.backend import wide_dtype
from core.precision import fast
from core.precision.formats import (
    NVFP4,
    Format,
    PerTensor,
    Quantised,
    block_amax_of,
    block_of,
    cast_of,
    decode_scaled,
    element_of,
    encode_scaled,
    given_amax,
    scales_for,
    stored_scales,
)

Axis = Literal[0, 1]


@dataclass(frozen=True, kw_only=True, eq=False)
class Grouped:
    """Rows of all experts in low precision: `shape` [R, C] row-wise, [C, R] column-wise; experts lie one after another along R.

    data, scales: as of one Quantised of that shape, but scales are [E] for PerTensor. tensor_scale_E: [E] float32, of NVFP4 alone.
    counts_E: [E] int64, how many of the R each expert has. axis: the dimension that R is, 0 or 1.
    """

    data: Tensor
    scales: Tensor
    tensor_scale_E: Tensor | None
    counts_E: Tensor
    axis: Axis
    format: Format
    shape: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        """What data and all scales take; the counts are the router's."""
        return (
            self.data.nbytes + self.scales.nbytes + (0 if self.tensor_scale_E is None else self.tensor_scale_E.nbytes)
        )

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers that the codes and scales mean, of `shape`; see Quantised.dequantise."""
        element, wide = element_of(self.format), wide_dtype(dtype)
        block = _block(self.format, self.shape, self.axis)
        scales = self.scales.to(wide)
        if isinstance(self.format, PerTensor):
            scales = self._along(scales, block)
        elif self.tensor_scale_E is not None:
            scales = scales * self._along(self.tensor_scale_E.to(wide), block)
        return decode_scaled(self.data, scales, block, element, self.shape, dtype)

    def expert(self, index: int) -> Quantised:
        """The piece of one expert, bit for bit what `quantise` makes of its rows alone (of their transpose where axis is 1)."""
        count = int(self.counts_E[index])
        start = int(self.counts_E[:index].sum())
        shape = (count, self.shape[1]) if self.axis == 0 else (self.shape[0], count)
        one = slice(index, index + 1)
        scales = (
            self.scales[one].view(1, 1) if isinstance(self.format, PerTensor) else self._cut(self.scales, start, count)
        )
        return Quantised(
            data=self._cut(self.data, start, count),
            scales=scales,
            tensor_scale=None if self.tensor_scale_E is None else self.tensor_scale_E[one].view(1, 1),
            format=self.format,
            shape=shape,
        )

    def _along(self, of_expert_E: Tensor, block: tuple[int, int]) -> Tensor:
        return _along(of_expert_E, self.counts_E // block[self.axis], self.axis)

    def _cut(self, tensor: Tensor, start: int, count: int) -> Tensor:
        """`count` of the R from `start`, of a tensor that has one place for so many of them."""
        places, total = tensor.shape[self.axis], self.shape[self.axis]
        each = max(1, total // max(1, places))
        return tensor.narrow(self.axis, start // each, count // each)


def quantise_grouped(
    x_RC: Tensor, counts_E: Tensor, format: Format, *, amax_E: Tensor | None = None, noise: Tensor | None = None
) -> Grouped:
    """The row-wise copy of rows sorted by expert, [R, C]; blocks along C.

    counts_E: [E] int64, summing to R; zeros are allowed. amax_E: [E], instead of measuring each expert's, for PerTensor and NVFP4.
    noise: [R, C], see `encode`. Raises ValueError for counts that do not sum to R, blocks of several
    rows, and amax_E for other formats.
    """
    return _by_kernels(x_RC, counts_E, format, 0, amax_E, noise) or _quantise(x_RC, counts_E, format, 0, amax_E, noise)


def quantise_grouped_columns(
    x_RC: Tensor, counts_E: Tensor, format: Format, *, amax_E: Tensor | None = None, noise: Tensor | None = None
) -> Grouped:
    """The column-wise copy of rows sorted by expert: [C, R], blocks along R, none of which lies in two experts; see `quantise_grouped`.

    noise: [C, R]. Raises ValueError also for counts that are no multiple of the block: rows of zeros must fill them beforehand, as
    permute does, since a short block inside would misalign all that follow.
    """
    return _by_kernels(x_RC, counts_E, format, 1, amax_E, noise) or _quantise(
        x_RC.T.contiguous(), counts_E, format, 1, amax_E, noise
    )


def _by_kernels(
    x_RC: Tensor, counts_E: Tensor, format: Format, axis: Axis, amax_E: Tensor | None, noise: Tensor | None
) -> Grouped | None:
    """What `_quantise` makes, by kernels where they run here. Counts that a GPU holds are not checked: the host would wait for them."""
    how = cast_of(format)
    if not fast.runs_kernels(x_RC, how):
        return None
    rows, columns = x_RC.shape
    shape = (rows, columns) if axis == 0 else (columns, rows)
    block = _block(format, shape, axis)
    _check_block(format, block)
    _check_amax(amax_E, len(counts_E), format)
    if counts_E.device.type == "cpu":
        _check(counts_E, rows, block[axis])
    made = fast.cast_grouped(x_RC, counts_E, how, turned=axis == 1, amax_E=amax_E, noise=noise)
    return Grouped(
        data=made.data.view(element_of(format).dtype),
        scales=stored_scales(made.scales, format),
        tensor_scale_E=made.tensor_scale,
        counts_E=counts_E,
        axis=axis,
        format=format,
        shape=shape,
    )


def _quantise(
    x: Tensor, counts_E: Tensor, format: Format, axis: Axis, amax_E: Tensor | None, noise: Tensor | None
) -> Grouped:
    """x as it is stored: R along `axis`."""
    shape = (x.shape[0], x.shape[1])
    block = _block(format, shape, axis)
    _check_block(format, block)
    _check(counts_E, shape[axis], block[axis])
    lines_E = counts_E // block[axis]
    block_amax = block_amax_of(x, block)
    stored, factor, tensor_scale_E = _scales(format, block_amax, lines_E, axis, amax_E)
    return Grouped(
        data=encode_scaled(x, factor, block, element_of(format), noise),
        scales=stored,
        tensor_scale_E=tensor_scale_E,
        counts_E=counts_E,
        axis=axis,
        format=format,
        shape=shape,
    )


def _scales(
    format: Format, block_amax: Tensor, lines_E: Tensor, axis: Axis, amax_E: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What is stored of the scales, the factors on the grid of blocks, and the tensor scale of each expert, if any."""
    if not isinstance(format, PerTensor | NVFP4):
        _check_amax(amax_E, len(lines_E), format)
        blocks = scales_for(format, block_amax, None)
        return blocks.stored, blocks.factor, None
    expert_amax = _expert_amax(block_amax, lines_E, axis, amax_E)
    experts = scales_for(format, expert_amax, expert_amax)
    if isinstance(format, PerTensor):
        return experts.stored, _along(experts.factor, lines_E, axis), None
    blocks = scales_for(format, block_amax, _along(expert_amax, lines_E, axis))
    return blocks.stored, blocks.factor, experts.tensor_scale


def _expert_amax(block_amax: Tensor, lines_E: Tensor, axis: Axis, given_E: Tensor | None) -> Tensor:
    """The amax of each expert [E], zero without rows; NaN where its rows are not finite, even where another amax is given."""
    of_line = block_amax.amax(1 - axis) if block_amax.numel() else block_amax.sum(1 - axis)
    measured = largest_of_experts(of_line, lines_E)
    return measured if given_E is None else given_amax(given_E, measured)


def largest_of_experts(of_line: Tensor, lines_E: Tensor) -> Tensor:
    """The largest of each expert's lines [E]: NaN where there is one, zero without lines. The host does not wait."""
    experts = torch.arange(len(lines_E), device=of_line.device)
    owners = experts.repeat_interleave(lines_E, output_size=len(of_line))
    return of_line.new_zeros(len(lines_E)).scatter_reduce(0, owners, of_line, "amax")


def _along(of_expert_E: Tensor, lines_E: Tensor, axis: Axis) -> Tensor:
    """The number of each line's expert, [lines, 1] or [1, lines]."""
    return of_expert_E.repeat_interleave(lines_E).unsqueeze(1 - axis)


def _block(format: Format, shape: tuple[int, int], axis: Axis) -> tuple[int, int]:
    """Rows and columns that share a factor; one line along `axis` for PerTensor, whose experts have one scale each."""
    if isinstance(format, PerTensor):
        return (1, max(1, shape[1])) if axis == 0 else (max(1, shape[0]), 1)
    return block_of(format, shape)


def _check_block(format: Format, block: tuple[int, int]) -> None:
    """Raises ValueError for blocks of several rows."""
    if not isinstance(format, PerTensor) and block[0] != 1:
        raise ValueError(
            f"rows of experts are quantised in blocks of one row, not of {block[0]}, which are for weights"
        )


def _check_amax(amax_E: Tensor | None, experts: int, format: Format) -> None:
    """Raises ValueError for an amax of a format that measures its own, or of another number of experts."""
    if amax_E is None:
        return
    if not isinstance(format, PerTensor | NVFP4):
        raise ValueError(f"{type(format).__name__} measures the amax of every block, and cannot be given one")
    if amax_E.dim() and amax_E.shape != (experts,):
        raise ValueError(f"an amax of shape {tuple(amax_E.shape)} for scales of shape {(experts,)}")


def _check(counts_E: Tensor, rows: int, multiple: int) -> None:
    """Raises ValueError for counts that do not cover the rows in whole blocks."""
    total = int(counts_E.sum())
    if total != rows:
        raise ValueError(f"the experts' counts sum to {total}, and there are {rows} rows")
    if (counts_E % multiple).any():
        odd = next(count for count in counts_E.tolist() if count % multiple)
        raise ValueError(
            f"an expert has {odd} rows; blocks along the rows need a multiple of {multiple}: fill up with zeros"
        )
