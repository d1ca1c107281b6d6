"""A quantiser's trial on a device, before anything is trained with it: hardware has reported stochastic rounding and given zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from core.errors import ZooError
from core.precision.formats import Format, Quantised, quantise
from core.precision.rounding import rounding_noise
from core.state.box import whole

_SHAPE = (48, 256)
# Of the mean of stochastic roundings, relative.
_TOLERANCE = 0.01


def self_check(format: Format, device: torch.device) -> None:
    """Round known numbers on `device`: bit for bit what a CPU makes of them, and stochastically to a mean within 1 % of them.

    The host waits for the device. Raises ZooError that names format and device where either is not so.
    """
    place = f"quantising to {format} on {device}"
    known = _known()
    noise = rounding_noise(0, "self_check", whole(_SHAPE), step=0)
    for drawn in (None, noise):
        here = quantise(known.to(device), format, noise=None if drawn is None else drawn.to(device))
        if not _same(here, quantise(known, format, noise=drawn)):
            how = "to the nearest" if drawn is None else "stochastically"
            raise ZooError(f"{place} rounds {how} to other bits than a CPU: do not train with this format there")
    # 1.3 lies between numbers of every format under the scale that 6 makes; a sixteenth of the numbers is that 6.
    x = torch.full(_SHAPE, 1.3)
    x[:, ::16] = 6.0
    mean = quantise(x.to(device), format, noise=noise.to(device)).dequantise().double().cpu()[x != 6.0].mean().item()
    if not abs(mean - 1.3) <= _TOLERANCE * 1.3:
        raise ZooError(
            f"{place} rounds 1.3 stochastically to {mean:.4f} on average, more than 1 % off: do not train with this format there"
        )


def _known() -> Tensor:
    """Numbers of many sizes and both signs, ties, and zeros; the same everywhere."""
    steps = torch.arange(_SHAPE[0] * _SHAPE[1], dtype=torch.float32).view(_SHAPE)
    return (steps % 97 - 48) * 2.0 ** (steps % 13 - 6)


def _same(a: Quantised, b: Quantised) -> bool:
    pairs = [(a.data, b.data), (a.scales, b.scales)]
    if a.tensor_scale is not None and b.tensor_scale is not None:
        pairs.append((a.tensor_scale, b.tensor_scale))
    return all(torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)
