"""What kernels that round to eight and four bits share: codes and scales, bit for bit those of core/precision, on every device.

Nothing here leaves a rounding to the device: codes are made from the bits of float32, divisions are IEEE's, no sum follows a product
that a compiler could fuse with it, and sizes are compared as integers, whose order is that of the numbers with infinity and NaN above.
Launch what uses them with `enable_fp_fusion=False`. An ELEMENT is a name of core/precision/elements.py: e4m3, e5m2 or e2m1.
"""

from __future__ import annotations

import triton
import triton.language as tl

# In float32: infinity, the one NaN that is stored, everything but the sign, the exponent alone, and the largest finite number.
_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_SIZE = tl.constexpr(0x7FFFFFFF)
_EXPONENT = tl.constexpr(0x7F800000)
_LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)


@triton.jit
def widen(x):
    """bfloat16, float16 or float32 as float32; of a NaN, too, the sign is kept, which conversions on a GPU drop."""
    if x.dtype == tl.bfloat16:
        wide = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.float16:
        sign = (x.to(tl.int16, bitcast=True).to(tl.int32) & 0x8000) << 16
        wide = (x.to(tl.float32).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    else:
        wide = x
    return wide


@triton.jit
def size_bits(x):
    """|x| of float32 as int32: the largest of some is the bits of the largest size, and that of a NaN where there is one."""
    return x.to(tl.int32, bitcast=True) & _SIZE


@triton.jit
def scaled(x, factor):
    """x · factor in float32, and the NaN that a processor makes of it: x's where x is one, else the positive one."""
    nan = tl.full([], _NAN, tl.int32).to(tl.float32, bitcast=True)
    known = factor == factor
    return tl.where(known, x * tl.where(known, factor, 1.0), tl.where(x == x, nan, x))


@triton.jit
def encode(x, noise, ELEMENT: tl.constexpr, STOCHASTIC: tl.constexpr):
    """`core.precision.elements.encode` of float32: uint8 codes. noise: float64 of x's shape where STOCHASTIC, else anything."""
    tl.static_assert(ELEMENT == "e4m3" or ELEMENT == "e5m2" or ELEMENT == "e2m1")
    mantissa: tl.constexpr = 3 if ELEMENT == "e4m3" else (2 if ELEMENT == "e5m2" else 1)
    # In float32's bits: the exponent of the smallest normal number, and the largest number.
    lowest: tl.constexpr = 121 << 23 if ELEMENT == "e4m3" else (113 << 23 if ELEMENT == "e5m2" else 127 << 23)
    largest: tl.constexpr = 0x43E00000 if ELEMENT == "e4m3" else (0x47600000 if ELEMENT == "e5m2" else 0x40C00000)
    rest: tl.constexpr = 0x7 if ELEMENT == "e2m1" else 0x7F
    bits = x.to(tl.int32, bitcast=True)
    size = bits & _SIZE
    kept = tl.minimum(size, largest)
    exponent = tl.maximum(kept & _EXPONENT, lowest)
    number = kept.to(tl.float32, bitcast=True)
    if STOCHASTIC:
        # Divided by the distance of neighbours, a power of two: exact, and below 2^(mantissa + 1).
        units = number * (((127 + mantissa) << 23) - (exponent - (127 << 23))).to(tl.float32, bitcast=True)
        whole = units.to(tl.int32)
        whole += ((units - whole.to(tl.float32)).to(tl.float64) > noise).to(tl.int32)
    else:
        # On top of 2^23 distances a float32 is rounded to whole distances, ties to even, and counts them in its last bits.
        many = exponent + ((23 - mantissa) << 23)
        whole = (number + many.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - many
    # A whole number that reaches the next power of two carries into the exponent by itself.
    code = whole + ((exponent - lowest) >> (23 - mantissa))
    code = tl.where(size > _INFINITY, rest, code)
    return (code | tl.where(bits < 0, rest + 1, 0)).to(tl.uint8)


@triton.jit
def pack(codes):
    """Four-bit codes [A, B], two to a byte, the first in the low half: [A, B / 2]."""
    A: tl.constexpr = codes.shape[0]
    B: tl.constexpr = codes.shape[1]
    low, high = tl.split(tl.reshape(codes, (A, B // 2, 2)))
    return low | (high << 4)


@triton.jit
def float32_scale(amax_bits, LARGEST: tl.constexpr, MAX_EXPONENT: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """`float32_scales` of core/precision/scales.py: (factor, stored). amax_bits: `size_bits`, largest of the block.

    LARGEST: number that amax is mapped to; MAX_EXPONENT: floor(log2(LARGEST)).
    """
    # Below this amax the factor would exceed 2^126, at which it stays; so nothing is divided by a subnormal number.
    least: tl.constexpr = (MAX_EXPONENT + 1) << 23
    finite = amax_bits < _INFINITY
    amax = tl.where(finite, tl.maximum(amax_bits, least), least).to(tl.float32, bitcast=True)
    # As torch divides a number by a tensor: by a product with the reciprocal.
    factor = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), amax) * LARGEST
    factor = tl.where(amax_bits > 0, tl.minimum(factor, 8.507059173023462e37), 1.0)
    bits = factor.to(tl.int32, bitcast=True)
    if POWER_OF_TWO:
        bits = bits & _EXPONENT
    factor = bits.to(tl.float32, bitcast=True)
    stored = tl.div_rn(tl.full(factor.shape, 1.0, tl.float32), factor).to(tl.int32, bitcast=True)
    factor = tl.where(finite, bits, _NAN).to(tl.float32, bitcast=True)
    return factor, tl.where(finite, stored, _NAN).to(tl.float32, bitcast=True)


@triton.jit
def mx_scale(amax_bits, ELEMENT: tl.constexpr, UP: tl.constexpr):
    """`mx_scales` of core/precision/scales.py: (factor, E8M0 code in uint8)."""
    largest: tl.constexpr = 0x43E00000 if ELEMENT == "e4m3" else (0x47600000 if ELEMENT == "e5m2" else 0x40C00000)
    # A difference of exponents; those of subnormal numbers and zero end at 2^-127 whichever they are.
    code = (amax_bits >> 23) - ((largest >> 23) - 127)
    if UP:
        code += ((amax_bits & 0x7FFFFF) > (largest & 0x7FFFFF)).to(tl.int32)
    code = tl.where(amax_bits < _INFINITY, tl.maximum(code, 0), 255)
    factor = tl.where(code == 255, _NAN, (254 - code) << 23).to(tl.float32, bitcast=True)
    return factor, code.to(tl.uint8)


@triton.jit
def nvfp4_scale(amax_bits, tensor_factor, tensor_stored):
    """`nvfp4_scales` of core/precision/scales.py for blocks: (factor, E4M3 code in uint8).

    tensor_factor, tensor_stored: `float32_scale` of the tensor's amax with LARGEST 2688 and MAX_EXPONENT 11; they broadcast.
    """
    finite = amax_bits < _INFINITY
    amax = tl.where(finite, amax_bits, 0).to(tl.float32, bitcast=True)
    wanted = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)) * tensor_factor
    code = tl.where(finite & (wanted == wanted), encode(wanted, wanted, "e4m3", False).to(tl.int32), 0x7F)
    normal = (((code >> 3) + 120) << 23 | (code & 7) << 20).to(tl.float32, bitcast=True)
    unit = tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal) * tensor_stored
    # The reciprocal of 2^-128, and of less, is above all float32.
    small = unit <= 2.938735877055719e-39
    factor = tl.div_rn(tl.full(unit.shape, 1.0, tl.float32), tl.where(small, 1.0, unit))
    factor = tl.where(small, tl.where(unit == 0.0, 0.0, _LARGEST_FLOAT), factor)
    nan = tl.full([], _NAN, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(code == 0x7F, nan, factor), code.to(tl.uint8)
