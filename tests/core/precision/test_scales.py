"""Scales by hand, against exact fractions, and at the ends of float32."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, seed
from hypothesis import strategies as st
from torch import Tensor

from core.precision.elements import E2M1, E4M3, E5M2, Element
from core.precision.formats import FP8_TENSOR, quantise
from core.precision.scales import (
    MXRounding,
    delayed_amax,
    delayed_scale,
    float32_scales,
    mx_scales,
    next_history,
    nvfp4_scales,
)

LARGEST_FLOAT = torch.finfo(torch.float32).max
JUST_ABOVE = float(np.nextafter(np.float32(1.75), np.float32(2)))
# Any finite float32 that is not zero, the subnormal ones too.
SIZES = st.floats(min_value=2.0**-149, max_value=LARGEST_FLOAT, width=32)


def exponents(amax: list[float], element: Element, rounding: MXRounding) -> list[int]:
    """The exponents of the E8M0 scales, from their bits; 128 is NaN."""
    return (mx_scales(torch.tensor(amax), element, rounding).stored.view(torch.uint8).int() - 127).tolist()


def test_the_shared_exponent_of_mx_is_that_of_the_largest_less_that_of_the_element() -> None:
    """OCP MX 1.0: floor(log2(amax)) - emax, where emax is 8 of E4M3, 15 of E5M2 and 2 of E2M1."""
    amax = [1.0, 1.99, 2.0, 448.0, 500.0, 511.9, 512.0, 0.75]
    assert exponents(amax, E4M3, "down") == [-8, -8, -7, 0, 0, 0, 1, -9]
    assert exponents(amax, E5M2, "down") == [-15, -15, -14, -7, -7, -7, -6, -16]
    assert exponents(amax, E2M1, "down") == [-2, -2, -1, 6, 6, 6, 7, -3]


def test_rounding_up_takes_the_least_scale_under_which_nothing_saturates() -> None:
    assert exponents([1.0, 1.75, JUST_ABOVE, 448.0, 448.1, 256.0], E4M3, "up") == [-8, -8, -7, 0, 1, 0]
    assert exponents([1.75, JUST_ABOVE, 57344.0, 57345.0], E5M2, "up") == [-15, -14, 0, 1]
    assert exponents([1.0, 6.0, 6.001, 7.0, 8.0], E2M1, "up") == [-2, 0, 1, 1, 1]


@seed(1)
@given(amax=SIZES, element=st.sampled_from([E4M3, E5M2, E2M1]))
def test_both_rules_of_mx_hold_in_exact_fractions(amax: float, element: Element) -> None:
    for rounding in ("down", "up"):
        (exponent,) = exponents([amax], element, rounding)
        ratio = Fraction(amax) / Fraction(2) ** exponent
        if exponent == -127:  # the smallest there is
            assert ratio <= element.largest
        elif rounding == "up":
            assert Fraction(element.largest) / 2 < ratio <= element.largest
        else:
            assert 2**element.max_exponent <= ratio < 2 ** (element.max_exponent + 1)


@pytest.mark.parametrize("rounding", ["down", "up"])
def test_mx_scales_of_zeros_of_the_smallest_and_of_what_is_not_finite(rounding: MXRounding) -> None:
    scales = mx_scales(torch.tensor([0.0, 2.0**-149, torch.inf, torch.nan, LARGEST_FLOAT]), E4M3, rounding)
    codes = scales.stored.view(torch.uint8).tolist()
    assert codes == [0, 0, 255, 255, 127 + 127 - 8 + (rounding == "up")]
    assert scales.factor.isnan().tolist() == [False, False, True, True, False]
    assert scales.factor[0] == 2.0**127


def test_a_float32_scale_maps_the_largest_to_the_largest() -> None:
    scales = float32_scales(torch.tensor([448.0, 1.0, 0.0, 7.0]), 448.0)
    assert scales.factor.tolist() == [1.0, 448.0, 1.0, 64.0]
    assert scales.stored.tolist() == [1.0, float(np.float32(1) / np.float32(448)), 1.0, 1 / 64]


@seed(2)
@given(amax=SIZES)
def test_a_power_of_two_scale_is_the_least_under_which_nothing_saturates(amax: float) -> None:
    scales = float32_scales(torch.tensor([amax]), 448.0, power_of_two=True)
    stored = Fraction(scales.stored.item())
    assert Fraction(scales.factor.item()) * stored == 1
    assert stored.numerator == 1 or (stored.denominator == 1 and stored.numerator & stored.numerator - 1 == 0)
    ratio = Fraction(amax) / stored
    assert ratio <= 448 and (ratio > 224 * (1 - Fraction(1, 2**23)) or stored == Fraction(1, 2**126))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("largest", [448.0, 57344.0, 2688.0])
def test_float32_scales_are_normal_numbers_at_both_ends_and_nan_marks_what_is_not_finite(
    largest: float, power_of_two: bool
) -> None:
    amax = torch.tensor([2.0**-149, 1e-38, LARGEST_FLOAT, torch.inf, torch.nan, 0.0])
    scales = float32_scales(amax, largest, power_of_two=power_of_two)
    for numbers in (scales.factor, scales.stored):
        assert numbers.isnan().tolist() == [False, False, False, True, True, False]
        assert (numbers[[0, 1, 2, 5]] >= torch.finfo(torch.float32).tiny).all() and numbers[
            [0, 1, 2, 5]
        ].isfinite().all()


def nvfp4(block_amax: list[float], tensor_amax: float) -> tuple[list[float], list[float], float]:
    """Block scales, factors and the tensor scale."""
    scales = nvfp4_scales(torch.tensor([block_amax]), torch.tensor([[tensor_amax]]))
    assert scales.tensor_scale is not None
    return scales.stored.float()[0].tolist(), scales.factor[0].tolist(), scales.tensor_scale.item()


@pytest.mark.parametrize("power", [0, -10, 30])
def test_the_two_scales_of_nvfp4_by_hand(power: int) -> None:
    """2688 = 6 · 448 makes the tensor scale 1. 1.6 / 6 = 0.2667 lies between 0.25 and 0.28125 in E4M3, nearer to the latter."""
    unit = 2.0**power
    stored, factor, tensor_scale = nvfp4([size * unit for size in (2688.0, 6.0, 1.6, 0.0)], 2688.0 * unit)
    assert stored == [448.0, 1.0, 0.28125, 0.0] and tensor_scale == unit
    reciprocals = [float(np.float32(1) / np.float32(s)) / unit for s in (448.0, 1.0, 0.28125)]
    assert factor == [*reciprocals, 0.0]


def test_a_block_that_is_too_small_for_its_tensor_vanishes_and_the_last_that_is_not_is_subnormal() -> None:
    """The smallest E4M3 number is 2^-9; half of it rounds to zero, being a tie with the even code."""
    stored, factor, _ = nvfp4([6 * 2.0**-10, 6 * 2.0**-10 * 1.01, 6 * 2.0**-9], 2688.0)
    assert stored == [0.0, 2.0**-9, 2.0**-9] and factor == [0.0, 512.0, 512.0]


def test_nvfp4_scales_of_zeros_and_of_what_is_not_finite() -> None:
    stored, factor, tensor_scale = nvfp4([0.0, 0.0], 0.0)
    assert (stored, factor, tensor_scale) == ([0.0, 0.0], [0.0, 0.0], 1.0)
    for bad in (torch.inf, torch.nan):
        scales = nvfp4_scales(torch.tensor([[1.0, bad]]), torch.tensor([[bad]]))
        assert (
            scales.stored.float().isnan().all()
            and scales.tensor_scale is not None
            and scales.tensor_scale.isnan().all()
        )
        of_one = nvfp4_scales(torch.tensor([[1.0, bad]]), torch.tensor([[9.0]]))
        assert of_one.stored.float().isnan().tolist() == [[False, True]]


def test_nvfp4_scales_of_the_smallest_numbers_are_finite() -> None:
    scales = nvfp4_scales(torch.tensor([[2.0**-149, 1e-38]]), torch.tensor([[1e-38]]))
    assert scales.factor.isfinite().all() and scales.stored.float().isfinite().all()


def history(*amax: float) -> Tensor:
    return torch.tensor(amax)


def test_delayed_scaling_takes_the_largest_or_the_latest_that_was_finite() -> None:
    steps = history(3.0, 7.0, 1.0, 0.0)
    assert delayed_amax(steps).item() == 7.0 and delayed_amax(steps, "latest").item() == 3.0
    assert delayed_amax(history(torch.inf, 2.0, torch.nan)).item() == 2.0
    assert delayed_amax(history(torch.nan, 2.0), "latest").item() == 0.0
    assert delayed_amax(steps, margin=2).item() == 28.0
    assert delayed_amax(history()).item() == 0.0


def test_a_scale_is_a_function_of_the_history_and_one_without_a_history() -> None:
    assert delayed_scale(history(3.0, 7.0), E4M3).item() == 7 / 448
    assert delayed_scale(history(3.0, 7.0), E5M2, margin=1).item() == 14 / 57344
    assert delayed_scale(history(0.0, 0.0), E4M3).item() == 1.0


def test_a_tensor_quantised_with_a_delayed_amax_has_the_scale_of_its_history_and_saturates_beyond() -> None:
    steps = history(7.0, 3.0)
    got = quantise(torch.tensor([[1.0, 14.0, -7.0]]), FP8_TENSOR, amax=delayed_amax(steps))
    assert torch.equal(got.scales, delayed_scale(steps, E4M3).view(1, 1))
    assert got.dequantise().tolist() == [[1.0, 7.0, -7.0]]


def test_the_newest_amax_stands_first_and_the_oldest_goes() -> None:
    assert next_history(history(3.0, 2.0, 1.0), torch.tensor(9.0)).tolist() == [9.0, 3.0, 2.0]
    assert next_history(history(3.0), torch.tensor([9.0], dtype=torch.float64)).tolist() == [9.0]
