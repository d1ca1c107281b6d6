"""What numbers are multiplied by before they are rounded, and by which their codes are multiplied to come back.

Rules for every scaling:

- a stored scale is what codes are multiplied by (value = code · scale [· tensor scale]);
- nothing but zeros: the scale is 1, or the smallest one where it is E8M0, or 0 where it is E4M3; the codes are zeros;
- an infinity or NaN: the scale is NaN, and so is every number that comes back under it. What was not finite never comes back finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from core.precision.elements import E2M1, E4M3, Element, encode, encode_e8m0, reciprocal_e8m0

# Neither this factor nor its reciprocal is subnormal, which a GPU may flush to zero.
_LARGEST_FACTOR = 2.0**126
_LARGEST_FLOAT = torch.finfo(torch.float32).max
_MANTISSA = (1 << 23) - 1

MXRounding = Literal["down", "up"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Scales:
    """factor: what numbers are multiplied by before they are rounded, float32. stored: what is kept of it; of the same shape.

    tensor_scale: the float32 scale on top of E4M3 ones, of a shape that `stored` broadcasts with.
    """

    factor: Tensor
    stored: Tensor
    tensor_scale: Tensor | None = None


def float32_scales(amax: Tensor, largest: float, *, power_of_two: bool = False) -> Scales:
    """Scales that map amax to `largest`: factor = largest / amax, stored = 1 / factor, both float32 (as Transformer Engine does).

    power_of_two: the factor is rounded down to one, so that no number saturates and scaling rounds nothing. A factor stays at or
    below 2^126. amax: float32 or float64, of any shape.
    """
    amax = amax.float()
    factor = torch.where(amax > 0, largest / amax, 1.0).clamp(max=_LARGEST_FACTOR)
    if power_of_two:
        factor = (factor.view(torch.int32) & ~_MANTISSA).view(torch.float32)
    factor = torch.where(amax.isfinite(), factor, math.nan)
    return Scales(factor=factor, stored=1.0 / factor)


def mx_scales(amax: Tensor, element: Element, rounding: MXRounding) -> Scales:
    """E8M0 scales of blocks with these largest sizes.

    down: 2^(floor(log2 amax) - floor(log2 largest)), the rule of OCP MX 1.0 section 6.3; the largest numbers of a block may saturate,
    by up to 1/8 in E4M3. up: the smallest power of two that brings amax to `largest` or below, so that nothing saturates
    (arXiv 2506.08027; Transformer Engine's; torchao's RCEIL). Both are exact; zeros take 2^-127.
    """
    finite = amax.isfinite()
    mantissa, exponent = torch.frexp(torch.where(finite, amax, 0.0))
    element_mantissa, element_exponent = math.frexp(element.largest)
    shared = exponent - element_exponent
    if rounding == "up":
        shared = shared + (mantissa > element_mantissa)
    shared = torch.where(mantissa > 0, shared, -127)
    stored = encode_e8m0(shared, finite)
    return Scales(factor=reciprocal_e8m0(stored), stored=stored)


def nvfp4_scales(block_amax: Tensor, tensor_amax: Tensor) -> Scales:
    """E4M3 scales of blocks of E2M1 under float32 tensor scales (arXiv 2509.25149, appendix on NVFP4 quantisation).

    tensor factor = 6 · 448 / tensor_amax; block scale = E4M3(block_amax / 6 · tensor factor), to the nearest; factor of a number =
    1 / (block scale · tensor scale). A block whose scale rounds to zero (amax below 2^-10 of 448 of the tensor's) has codes of zero.
    tensor_amax: of a shape that block_amax broadcasts with. Everything is float32.
    """
    tensor = float32_scales(tensor_amax, E2M1.largest * E4M3.largest)
    # By a tensor: torch divides by a number on a GPU as a product with its reciprocal, to other bits than a CPU.
    six = torch.full((), E2M1.largest, device=block_amax.device)
    wanted = block_amax.float() / six * tensor.factor
    wanted = torch.where(block_amax.isfinite(), wanted, math.nan)
    stored = encode(wanted, E4M3).view(E4M3.dtype)
    unit = stored.float() * tensor.stored
    factor = torch.where(unit == 0, 0.0, (1.0 / unit).clamp(max=_LARGEST_FLOAT))
    return Scales(factor=factor, stored=stored, tensor_scale=tensor.stored)


def next_history(history_H: Tensor, amax: Tensor) -> Tensor:
    """The history of one more step: [..., H] float32, the newest amax [...] first, the oldest dropped."""
    return torch.cat((amax.float().reshape(*history_H.shape[:-1], 1), history_H[..., :-1]), dim=-1)


def delayed_amax(history_H: Tensor, choice: Literal["max", "latest"] = "max", *, margin: int = 0) -> Tensor:
    """The amax that delayed scaling expects from earlier steps' [..., H]: float32 [...], times 2^margin for growth.

    Steps that were not finite are passed over; zero, which gives the scale 1, where none is left.
    """
    if choice == "latest":
        history_H = history_H[..., :1]
    known = torch.where(history_H.isfinite(), history_H.float(), 0.0)
    amax = known.amax(-1) if known.shape[-1] else known.sum(-1)
    return amax * 2.0**margin


def delayed_scale(
    history_H: Tensor, element: Element, choice: Literal["max", "latest"] = "max", *, margin: int = 0
) -> Tensor:
    """The scale of a tensor by its amax history, a float32 scalar; what `quantise` stores where it is given `delayed_amax`."""
    return float32_scales(delayed_amax(history_H, choice, margin=margin), element.largest).stored
