"""What rounding loses, added up over operands as they are quantised; sums, so that those of all ranks add up by one all-reduce."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from core.kernels.backend import wide_dtype
from core.precision.elements import encode, store
from core.precision.formats import Quantised, element_of
from core.precision.grouped import Grouped

# Scales are counted by the power of two below them, from the smallest of these to the largest; beyond are the ends.
SMALLEST_EXPONENT, LARGEST_EXPONENT = -40, 40
# elements, sum of squares, sum of squared errors, saturated, flushed; then elements by the power of two of their scale. An element that is
# zero is none of them: rows of zeros fill up experts' rows, by another number under every mapping.
NUM_SUMS = 5
NUM_WATCHED = NUM_SUMS + LARGEST_EXPONENT - SMALLEST_EXPONENT + 1
# A scale is rounded to float32, and its largest number with it: what exceeds that by less has not been cut off.
_ROUNDING = 1 + 2.0**-20


class Watch:
    """Adds up what became of the operands that it is shown.

    sums: [NUM_WATCHED] float64, to be added over ranks. largest: the largest size seen, float64, of which the largest over ranks counts. NaN
    where an operand was not finite.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(NUM_WATCHED, dtype=torch.float64, device=device)
        self.largest = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, x: Tensor, quantised: Quantised | Grouped) -> None:
        """Add an operand x [..., R, C] and what it was rounded to, of x's shape.

        Raises ValueError for another shape.
        """
        if tuple(x.shape) != quantised.shape:
            raise ValueError(f"an operand of shape {tuple(x.shape)}, and {quantised.shape} is what it was rounded to")
        if not x.numel():
            return
        x = x.to(wide_dtype(x.dtype))
        rounded, end = quantised.dequantise(x.dtype), _largest_numbers(quantised, x.dtype)
        size = x.abs()
        some = size != 0
        self.sums[0] += some.sum()
        self.sums[1] += _squares(x)
        self.sums[2] += _squares(x - rounded)
        self.sums[3] += (size > end * _ROUNDING).sum()
        self.sums[4] += (some & (rounded == 0)).sum()
        self.sums[NUM_SUMS:] += _by_exponent(end[some] / element_of(quantised.format).largest)
        self.largest = torch.maximum(self.largest, size.max().to(torch.float64))


def _largest_numbers(quantised: Quantised | Grouped, dtype: torch.dtype) -> Tensor:
    """The largest number that each element could have become, under its scales."""
    element = element_of(quantised.format)
    ends = torch.full(quantised.shape, element.largest, dtype=dtype, device=quantised.data.device)
    return replace(quantised, data=store(encode(ends, element), element)).dequantise(dtype)


def _squares(x: Tensor) -> Tensor:
    """The sum of squares, in float64: those of gradients would be nothing in float32."""
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


def _by_exponent(scales: Tensor) -> Tensor:
    """How many scales lie at or above each power of two and below the next, float64; what is no number is not counted, zero is smallest."""
    known = scales.isfinite()
    within = torch.where(known, scales, 1.0).clamp(2.0**SMALLEST_EXPONENT, 2.0**LARGEST_EXPONENT)
    place = torch.frexp(within).exponent - 1 - SMALLEST_EXPONENT
    counts = torch.zeros(NUM_WATCHED - NUM_SUMS, dtype=torch.float64, device=scales.device)
    return counts.index_add(0, place.flatten(), known.flatten().to(torch.float64))
