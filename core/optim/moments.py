"""Adam's moments between steps: as they are, rounded, or as float16 and float8 numbers under a scale for 128 neighbours.

A scale is a power of two, kept as one byte (E8M0): scaling rounds nothing, and rounding again what was read from a checkpoint changes
nothing as long as its blocks are no larger than before. Blocks are those of a rank's flat piece of the tensor, beginning with the first element:
ZeRO-1 parts are whole blocks (core/optim/buckets.py), so dp, cp, edp and pp change none; nor do tp and ep where rows, or whole
experts, are multiples of 128. Otherwise values at the edges share a scale with other neighbours.

The second moment is kept as its root, which needs half as many exponents: beside the largest of its block a root fits that is 2^-17 of it in
float8 and 2^-40 in float16. A smaller one becomes the smallest that fits, never zero, since the update divides by it: such an
element moves too little rather than too far. Zero stays zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from core.optim.kept import BLOCK, Kept
from core.precision.elements import E4M3, decode, encode, encode_e8m0, reciprocal_e8m0
from core.precision.rounding import rounding_noise
from core.state.box import Box, flat_boxes

SCALED = (torch.float16, torch.float8_e4m3fn)
# Of the scale of a block, so that the smallest number under it, or its square, is still a normal float32.
_LEAST_EXPONENT = {"plain": -102, "root": -39}
_LARGEST = {torch.float16: 65504.0, torch.float8_e4m3fn: E4M3.largest}
_SMALLEST_FLOAT16 = 2.0**-24


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which tensor lies in a flat shard: the first element of its piece `box` at `start`, which is negative where the shard begins later."""

    name: str
    box: Box
    start: int


class PlainMoment:
    """A moment in `dtype`, rounded to nearest even when it is written."""

    stochastic, scaled = False, False

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device, on_host: int) -> None:
        self.parts: tuple[Kept, ...] = (Kept(elements, dtype, device, on_host=on_host),)
        self.saved = dtype

    def widen(self, numbers: Sequence[Tensor], wide: torch.dtype) -> Tensor:
        """The moment of a piece in `wide`; itself where it is kept in that."""
        return numbers[0].to(wide)

    def narrow(self, numbers: Sequence[Tensor], value: Tensor, noise: Tensor | None) -> None:
        """Write the new moment of a piece where the old one is."""
        numbers[0].copy_(value)


class ScaledMoment:
    """A moment, or its root, in float16 or E4M3 under a scale for 128 elements: 2 + 1/128 bytes of an element, or 1 + 1/128.

    float16 is rounded to nearest even. float8, whose neighbours are 6 to 12 % apart, is rounded stochastically: to nearest, a decay of 5 % would
    be undone every time, and a moment could only grow. A value goes up to one neighbour or down to the other with the
    probabilities at which its mean is the value; for a root those at which the mean of its square is the second moment.
    saved: the dtype in which a checkpoint has the moment exactly: a square of four bits has eight, as bfloat16 has.
    """

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device, on_host: int, root: bool) -> None:
        self.dtype, self.root, self.scaled = dtype, root, True
        self.stochastic = dtype == torch.float8_e4m3fn
        self.saved = torch.bfloat16 if self.stochastic else torch.float32
        codes = Kept(elements, torch.uint8 if self.stochastic else dtype, device, on_host=on_host)
        self.parts: tuple[Kept, ...] = (codes, Kept(elements, torch.uint8, device, on_host=on_host, per=BLOCK))

    def widen(self, numbers: Sequence[Tensor], wide: torch.dtype) -> Tensor:
        """The moment of a piece in `wide`, exact."""
        codes, scales = numbers
        plain = decode(codes, E4M3) if self.stochastic else codes.float()
        value = _blocks(plain) * scales.view(torch.float8_e8m0fnu).float()[:, None]
        flat = value.view(-1)[: codes.numel()]
        return (flat.square() if self.root else flat).to(wide)

    def narrow(self, numbers: Sequence[Tensor], value: Tensor, noise: Tensor | None) -> None:
        """Write the new moment of a piece. noise: of its shape, uniform in (0, 1); None rounds to nearest even."""
        blocks = _blocks(value.float().sqrt() if self.root else value.float())
        scales = _scales(blocks.abs().amax(dim=1), _LARGEST[self.dtype], "root" if self.root else "plain")
        scaled = blocks * reciprocal_e8m0(scales)[:, None]
        if not self.stochastic:
            codes = scaled.half()
            if self.root:
                codes = torch.where((scaled > 0) & (codes == 0), _SMALLEST_FLOAT16, codes)
        elif self.root:
            codes = _encode_root(scaled, None if noise is None else _blocks(noise))
        else:
            codes = encode(scaled, E4M3, noise=None if noise is None else _blocks(noise))
        numbers[0].copy_(codes.view(-1)[: value.numel()])
        numbers[1].copy_(scales.view(torch.uint8))


Moment = PlainMoment | ScaledMoment


def kept_moments(elements: int, dtype: torch.dtype, device: torch.device, on_host: int) -> tuple[Moment, Moment]:
    """Both moments of so many elements, zero."""
    if dtype in SCALED:
        first, second = (ScaledMoment(elements, dtype, device, on_host, root) for root in (False, True))
        return first, second
    return PlainMoment(elements, dtype, device, on_host), PlainMoment(elements, dtype, device, on_host)


def noise_of(places: Sequence[Place], start: int, stop: int, *, seed: int, step: int, device: torch.device) -> Tensor:
    """Noise for the elements [start, stop) of a shard, two numbers for each: [2, stop - start] float32, of 16 random bits each.

    It depends on the seed, the tensor's name, the element's place in the whole tensor and the step, whoever holds it. What belongs to no
    tensor gets one half.
    """
    drawn = torch.full((stop - start,), 0.5, dtype=torch.float64, device=device)
    for place in places:
        low, high = max(start, place.start), min(stop, place.start + place.box.elements)
        if low >= high:
            continue
        for box, number in flat_boxes(place.box, low - place.start, high - place.start):
            at = place.start + number - start
            fresh = rounding_noise(seed, f"optimizer.{place.name}", box, step=step, device=device)
            drawn[at : at + box.elements] = fresh.view(-1)
    upper = (drawn * 65536).floor()
    return torch.stack([(upper + 0.5) / 65536, drawn * 65536 - upper]).float()


def _encode_root(scaled: Tensor, noise: Tensor | None) -> Tensor:
    """The E4M3 codes of roots [0, 448], so that the mean of their squares is the square; what is not zero stays so."""
    if noise is None:
        codes = encode(scaled, E4M3)
    else:
        codes = encode(scaled, E4M3, noise=torch.ones_like(scaled))  # towards zero: nothing exceeds this noise
        low, high = decode(codes, E4M3).square(), decode(codes + 1, E4M3).square()
        # Above the largest is a NaN, which nothing exceeds.
        codes = codes + (scaled.square() - low > noise * (high - low))
    return torch.maximum(codes, (scaled > 0).to(torch.uint8))


def _scales(amax: Tensor, largest: float, kind: str) -> Tensor:
    """The least powers of two that bring blocks of these largest sizes to `largest` or below, float8_e8m0fnu; NaN of what is not finite."""
    finite = amax.isfinite()
    mantissa, exponent = torch.frexp(torch.where(finite, amax, 0.0))
    of_largest = math.frexp(largest)
    exponent = exponent - of_largest[1] + (mantissa > of_largest[0])
    exponent = torch.where(mantissa > 0, exponent, _LEAST_EXPONENT[kind]).clamp(min=_LEAST_EXPONENT[kind])
    return encode_e8m0(exponent, finite)


def _blocks(flat: Tensor) -> Tensor:
    """[n] as [ceil(n / 128), 128], the end filled with zeros."""
    return F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK) if flat.numel() % BLOCK else flat.view(-1, BLOCK)
