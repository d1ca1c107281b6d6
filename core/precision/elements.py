"""Numbers of eight and four bits: E4M3, E5M2, E2M1 and the scale E8M0, exact on every device (OCP OFP8 1.0, OCP MX 1.0).

A *code* is the bits of one number in a uint8, of which E2M1 uses the low four. Rules of `encode`, for every format:

- zero: keeps its sign, and so does what rounds to zero;
- overflow: saturates to the largest finite number, infinity too, as the hardware's satfinite casts do. Whoever quantises must
  mark an infinity in the scale (core/precision/formats.py does), for the code no longer shows it;
- NaN: all bits but the sign set, which is a NaN in E4M3 and E5M2, and ±6 in E2M1, which has none;
- subnormal numbers: are rounded to like any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.backend import wide_dtype


@dataclass(frozen=True, kw_only=True)
class Element:
    """A format of numbers: one sign, `bits` in all. min_exponent: of the smallest normal number. dtype: as it is stored."""

    name: str
    bits: int
    mantissa_bits: int
    min_exponent: int
    largest: float
    dtype: torch.dtype

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest number: floor(log2(largest))."""
        return math.frexp(self.largest)[1] - 1

    @property
    def sign_bit(self) -> int:
        """The code of minus zero."""
        return 1 << (self.bits - 1)


E4M3 = Element(
    name="e4m3", bits=8, mantissa_bits=3, min_exponent=-6, largest=448.0, dtype=torch.float8_e4m3fn
)  # no infinity, one NaN
E5M2 = Element(name="e5m2", bits=8, mantissa_bits=2, min_exponent=-14, largest=57344.0, dtype=torch.float8_e5m2)
E2M1 = Element(name="e2m1", bits=4, mantissa_bits=1, min_exponent=0, largest=6.0, dtype=torch.uint8)  # two to a byte

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# E8M0 holds 2^-127 to 2^127, and NaN in its last code.
E8M0_BIAS = 127


def encode(x: Tensor, element: Element, *, noise: Tensor | None = None) -> Tensor:
    """The codes of x's elements, uint8 of x's shape: rounded to the nearest, ties to even, or stochastically with `noise`.

    noise: of x's shape, uniform in (0, 1). A number between two neighbours goes to the farther-from-zero one where its
    distance from the nearer-to-zero one, in units of their distance, exceeds the noise; so a number that has a code never moves.
    x is float64, float32, or narrower; no result is rounded twice. Raises ValueError for noise of another shape.
    """
    x = x.to(wide_dtype(x.dtype))
    if noise is not None:
        check_noise(noise, x.shape)
        return _encode_by_arithmetic(x, element, noise)
    if element.bits == 4:
        return _encode_e2m1(x)
    if x.dtype == torch.float64:  # torch's own cast goes through float32
        return _encode_by_arithmetic(x, element, None)
    return x.clamp(-element.largest, element.largest).to(element.dtype).view(torch.uint8)


def check_noise(noise: Tensor, shape: torch.Size) -> None:
    """Raises ValueError for noise of another shape than the numbers'."""
    if noise.shape != shape:
        raise ValueError(f"noise of shape {tuple(noise.shape)} for numbers of shape {tuple(shape)}")


def decode(codes: Tensor, element: Element, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers of uint8 codes, of their shape; exact in float32 and wider."""
    if element.bits == 8:
        return codes.view(element.dtype).to(dtype)
    values = torch.tensor(_E2M1_VALUES + tuple(-v for v in _E2M1_VALUES), dtype=dtype, device=codes.device)
    return values[codes.int()]


def pack(codes: Tensor) -> Tensor:
    """Four-bit codes [..., C], two to a byte, the first in the low half: [..., ceil(C / 2)] uint8. An odd C ends in a zero."""
    columns = -(-codes.shape[-1] // 2)
    if codes.shape[-1] % 2 or codes.storage_offset() % 2:
        codes = F.pad(codes, (0, codes.shape[-1] % 2))
    pairs = codes.flatten().view(torch.int16)  # the second code in the high byte
    return (pairs | pairs >> 4).to(torch.uint8).view(*codes.shape[:-1], columns)


def unpack(data: Tensor, columns: int) -> Tensor:
    """The inverse of `pack`: the four-bit codes [..., columns] uint8."""
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)[..., :columns]


def store(codes: Tensor, element: Element) -> Tensor:
    """Codes [..., C] as they are kept: in the element's own dtype, or packed in uint8 [..., ceil(C / 2)] where it has four bits."""
    return pack(codes) if element.bits == 4 else codes.view(element.dtype)


def codes_of(data: Tensor, element: Element, columns: int) -> Tensor:
    """The inverse of `store`: codes [..., columns] uint8."""
    return unpack(data, columns) if element.bits == 4 else data.view(torch.uint8)


def encode_e8m0(exponents: Tensor, valid: Tensor) -> Tensor:
    """The scales 2^exponents as float8_e8m0fnu, exponents outside [-127, 127] saturated; NaN where not `valid` (bool)."""
    codes = exponents.clamp(-E8M0_BIAS, E8M0_BIAS) + E8M0_BIAS
    return torch.where(valid, codes, 255).to(torch.uint8).view(torch.float8_e8m0fnu)


def reciprocal_e8m0(scales: Tensor) -> Tensor:
    """1 / scales in float32, exact: [2^-127, 2^127] again, and NaN of NaN."""
    codes = scales.view(torch.uint8)
    return torch.where(codes == 255, codes, 254 - codes).view(torch.float8_e8m0fnu).float()


def _encode_e2m1(x: Tensor) -> Tensor:
    """The nearest of eight numbers, whose distance is 1/2 up to 2, 1 up to 4, and 2 from there: below each bound the count of
    steps with that distance is the smallest of the three, and rounding it goes to the even code."""
    size = x.abs().nan_to_num_(nan=6.0).clamp_(max=6.0)
    codes = (size * 2).round_()
    codes = torch.minimum(codes, size.round().add_(2))
    codes = torch.minimum(codes, size.mul_(0.5).round_().add_(4))
    return codes.to(torch.uint8).bitwise_or_(x.signbit().view(torch.uint8).bitwise_left_shift_(3))


def _encode_by_arithmetic(x: Tensor, element: Element, noise: Tensor | None) -> Tensor:
    """Any format: divide by the distance of neighbours, a power of two, round that to a whole number; all steps are exact."""
    nan = x.isnan()
    size = x.abs().clamp(max=element.largest).masked_fill(nan, 0.0)
    # size = mantissa * 2^exponent with a mantissa in [0.5, 1); below the normal numbers the distance stays the same.
    exponent = torch.frexp(size.clamp(min=2.0**element.min_exponent)).exponent - 1
    inverse_distance = ((127 + element.mantissa_bits - exponent) << 23).view(torch.float32)
    units = size * inverse_distance
    if noise is None:
        whole = units.round()
    else:
        whole = units.floor()
        whole += (units - whole) > noise
    # A whole number that reaches the next power of two carries into the exponent by itself.
    codes = whole.to(torch.int32) + ((exponent - element.min_exponent) << element.mantissa_bits)
    codes = codes.masked_fill(nan, element.sign_bit - 1).to(torch.uint8)
    return codes | x.signbit().to(torch.uint8) << (element.bits - 1)
