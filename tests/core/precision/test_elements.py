"""Codes of eight and four bits: every value against ml_dtypes, every boundary between two against exact fractions."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from core.precision.elements import (
    E2M1,
    E4M3,
    E5M2,
    Element,
    codes_of,
    decode,
    encode,
    encode_e8m0,
    pack,
    reciprocal_e8m0,
    store,
    unpack,
)

NUMPY = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
ELEMENTS = [E4M3, E5M2, E2M1]
EIGHT_BITS = [E4M3, E5M2]


def named(value: object) -> str:
    return value.name if isinstance(value, Element) else str(value)


def all_codes(element: Element) -> Tensor:
    return torch.arange(1 << element.bits, dtype=torch.int32).to(torch.uint8)


def true_values(element: Element) -> np.ndarray:
    """What ml_dtypes reads in every code, float64."""
    return all_codes(element).numpy().view(NUMPY[element.name]).astype(np.float64)


def true_codes(x: Tensor, element: Element) -> np.ndarray:
    """What ml_dtypes rounds to, of numbers that were cut at the largest before: its casts do not saturate."""
    cut = np.clip(x.double().numpy(), -element.largest, element.largest)
    return cut.astype(np.float32).astype(NUMPY[element.name]).view(np.uint8)


def every(dtype: torch.dtype) -> Tensor:
    """All 65,536 numbers of a dtype of 16 bits."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)


def check_codes(x: Tensor, element: Element) -> None:
    """Encoding equals ml_dtypes's, and NaN, of which ml_dtypes keeps other bits, has all bits set but the sign."""
    nan = x.isnan().numpy()
    for given in (x, x.float(), x.double()):
        got = encode(given, element).numpy()
        np.testing.assert_array_equal(got[~nan], true_codes(x, element)[~nan])
        assert set((got[nan] & (element.sign_bit - 1)).tolist()) <= {element.sign_bit - 1}


@pytest.mark.parametrize("element", ELEMENTS, ids=named)
def test_every_code_means_what_ml_dtypes_reads(element: Element) -> None:
    truth = true_values(element)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        got = decode(all_codes(element), element, dtype)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.double().numpy(), truth)
        number = ~np.isnan(truth)  # the sign of a NaN means nothing
        np.testing.assert_array_equal(np.signbit(got.double().numpy())[number], np.signbit(truth)[number])


@pytest.mark.parametrize("element", ELEMENTS, ids=named)
def test_the_limits_of_a_format_are_those_of_its_codes(element: Element) -> None:
    finite = true_values(element)[np.isfinite(true_values(element))]
    assert element.largest == finite.max() and 2.0**element.max_exponent <= finite.max() < 2.0 ** (
        element.max_exponent + 1
    )
    smallest = finite[finite > 0].min()
    assert smallest == 2.0 ** (element.min_exponent - element.mantissa_bits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("element", ELEMENTS, ids=named)
def test_every_number_of_sixteen_bits_rounds_as_ml_dtypes_rounds_it(element: Element, dtype: torch.dtype) -> None:
    check_codes(every(dtype), element)


@pytest.mark.parametrize("element", EIGHT_BITS, ids=named)
def test_torch_casts_every_bfloat16_that_is_in_range_to_the_same_code(element: Element) -> None:
    x = every(torch.bfloat16)
    x = x[(x.abs() <= element.largest) | x.isnan()]
    assert torch.equal(encode(x.double(), element), x.to(element.dtype).view(torch.uint8))


def boundaries(element: Element) -> list[tuple[int, float, float, float]]:
    """Of every two neighbours from zero up: the lower one's code, the lower, the upper and the number half way."""
    values = true_values(element)
    positive = [v for v in values[: element.sign_bit].tolist() if v <= element.largest]
    return [(i, low, high, (low + high) / 2) for i, (low, high) in enumerate(pairwise(positive))]


@pytest.mark.parametrize("element", ELEMENTS, ids=named)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_half_way_goes_to_the_even_code_and_its_neighbours_to_the_nearer(element: Element, dtype: type) -> None:
    """In float64 the numbers beside a half way are so close to it that float32 could not tell them apart."""
    numbers, expected = [], []
    for code, low, high, half in boundaries(element):
        assert Fraction(low) + Fraction(high) == 2 * Fraction(half)
        middle = dtype(half)
        numbers += [middle, np.nextafter(middle, dtype(0)), np.nextafter(middle, dtype(1e6)), dtype(low), dtype(high)]
        expected += [code + code % 2, code, code + 1, code, code + 1]
    x, codes = torch.from_numpy(np.array(numbers, dtype=dtype)), torch.tensor(expected, dtype=torch.uint8)
    assert torch.equal(encode(x, element), codes)
    assert torch.equal(encode(-x, element), codes | element.sign_bit)


@pytest.mark.parametrize("element", ELEMENTS, ids=named)
def test_float32_across_the_whole_range_rounds_as_ml_dtypes_rounds_it(element: Element) -> None:
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 17,), generator=torch.Generator().manual_seed(3))
    near = torch.randn(1 << 16, generator=torch.Generator().manual_seed(4)) * element.largest / 3
    check_codes(torch.cat((bits.to(torch.int32).view(torch.float32), near, near * 1e-4)), element)


@pytest.mark.parametrize("noise", [None, 1e-9, 0.5, 1 - 1e-9])
@pytest.mark.parametrize("element", ELEMENTS, ids=named)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_number_that_has_a_code_keeps_it(element: Element, dtype: torch.dtype, noise: float | None) -> None:
    codes = all_codes(element)
    codes = codes[decode(codes, element).isfinite()]
    x = decode(codes, element, dtype)
    drawn = None if noise is None else torch.full(x.shape, noise, dtype=torch.float64)
    assert torch.equal(encode(x, element, noise=drawn), codes)


@pytest.mark.parametrize("element", ELEMENTS, ids=named)
@pytest.mark.parametrize("noise", [None, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_infinity_saturates_nan_stays_and_zero_keeps_its_sign(
    element: Element, noise: float | None, dtype: torch.dtype
) -> None:
    top, sign = {"e4m3": 0x7E, "e5m2": 0x7B, "e2m1": 0x7}[element.name], element.sign_bit
    tiny = 2.0**-140  # subnormal in float32
    numbers = [torch.inf, -torch.inf, 1e30, -1e30, torch.nan, 0.0, -0.0, tiny, -tiny]
    expected = [top, top | sign, top, top | sign, sign - 1, 0, sign, 0, sign]
    x = torch.tensor(numbers, dtype=dtype)
    drawn = None if noise is None else torch.full(x.shape, noise, dtype=torch.float64)
    assert encode(x, element, noise=drawn).tolist() == expected


@pytest.mark.parametrize("element", ELEMENTS, ids=named)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (1,), (2, 3, 7)])
def test_any_shape_is_stored_and_read_again(element: Element, shape: tuple[int, ...]) -> None:
    codes = encode(torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3, element)
    assert codes.shape == shape and codes.dtype == torch.uint8
    data = store(codes, element)
    assert (
        data.nbytes == codes[..., 0].numel() * ((shape[-1] * element.bits + 7) // 8) if shape[-1] else data.nbytes == 0
    )
    assert torch.equal(codes_of(data, element, shape[-1]), codes)


def test_the_first_of_two_four_bit_numbers_lies_in_the_low_half() -> None:
    packed = pack(torch.tensor([[1, 2, 0xF], [0, 7, 8]], dtype=torch.uint8))
    assert packed.tolist() == [[0x21, 0x0F], [0x70, 0x08]]
    assert unpack(packed, 3).tolist() == [[1, 2, 0xF], [0, 7, 8]]


def test_scales_of_eight_bits_are_powers_of_two_as_ml_dtypes_reads_them() -> None:
    scales = encode_e8m0(torch.arange(-127, 128), torch.ones(255, dtype=torch.bool))
    truth = np.arange(255, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    np.testing.assert_array_equal(scales.float().double().numpy(), truth)
    np.testing.assert_array_equal(truth, 2.0 ** np.arange(-127, 128))
    np.testing.assert_array_equal(reciprocal_e8m0(scales).double().numpy(), 1 / truth)


def test_scales_out_of_range_saturate_and_nan_is_the_last_code() -> None:
    scales = encode_e8m0(torch.tensor([-300, 300, 5]), torch.tensor([True, True, False]))
    assert scales.view(torch.uint8).tolist() == [0, 254, 255]
    assert scales.float().isnan().tolist() == [False, False, True]
    assert reciprocal_e8m0(scales).isnan().tolist() == [False, False, True]
