"""What rounding loses, against numpy in float64 and ml_dtypes, and as sums that add up in any order."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from core.precision.elements import E2M1, E4M3
from core.precision.formats import (
    FP8_ROWS,
    FP8_TENSOR,
    FP8_TENSOR_GRADIENT,
    FP8_WEIGHT,
    MX,
    MXFP8,
    NVFP4_ROWS,
    NVFP4_WEIGHT,
    Format,
    quantise,
)
from core.precision.grouped import quantise_grouped, quantise_grouped_columns
from core.precision.insight import NUM_SUMS, NUM_WATCHED, SMALLEST_EXPONENT, Watch

CPU = torch.device("cpu")
FORMATS = (FP8_TENSOR, FP8_TENSOR_GRADIENT, FP8_ROWS, FP8_WEIGHT, MXFP8, NVFP4_ROWS, NVFP4_WEIGHT)


def numbers(*shape: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    """Of many sizes, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * torch.exp2(spread * torch.randn(*shape, generator=generator))
    return x.masked_fill(torch.rand(*shape, generator=generator) < 0.1, 0.0)


def seen(x: Tensor, format: Format, **given: Tensor) -> Watch:
    watch = Watch(CPU)
    watch.add(x, quantise(x, format, **given))
    return watch


def histogram(watch: Watch) -> dict[int, int]:
    counts = watch.sums[NUM_SUMS:].tolist()
    return {place + SMALLEST_EXPONENT: int(count) for place, count in enumerate(counts) if count}


def test_sums_are_those_of_numpy_in_float64_with_numbers_beyond_the_expected_largest() -> None:
    x = numbers(7, 37, spread=6.0)
    watch = seen(x, FP8_TENSOR, amax=torch.tensor(28.0))
    exact = x.double().numpy()
    codes = np.clip(exact * 16, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    rounded = codes.astype(np.float64) / 16
    saturated = int((np.abs(exact) > 28).sum())
    flushed = int(((exact != 0) & (rounded == 0)).sum())
    assert saturated > 5 and flushed > 1
    nonzero = int((exact != 0).sum())
    assert nonzero < x.numel()
    wanted = [nonzero, (exact**2).sum(), ((exact - rounded) ** 2).sum(), saturated, flushed]
    np.testing.assert_allclose(watch.sums[:NUM_SUMS].numpy(), wanted, rtol=1e-12)
    assert watch.largest == np.abs(exact).max()
    assert histogram(watch) == {-4: nonzero}


@pytest.mark.parametrize("format", FORMATS)
def test_errors_and_flushed_numbers_are_those_of_what_comes_back(format: Format) -> None:
    x = numbers(5, 131, spread=8.0)
    watch, back = seen(x, format), quantise(x, format).dequantise().double().numpy()
    exact = x.double().numpy()
    np.testing.assert_allclose(float(watch.sums[2]), ((exact - back) ** 2).sum(), rtol=1e-6)
    assert watch.sums[4] == ((exact != 0) & (back == 0)).sum()
    assert watch.sums[NUM_SUMS:].sum() == watch.sums[0] == (exact != 0).sum()


@pytest.mark.parametrize("format", (FP8_TENSOR, FP8_TENSOR_GRADIENT, FP8_ROWS, FP8_WEIGHT, MXFP8))
@pytest.mark.parametrize("seed", range(5))
def test_nothing_saturates_under_a_scale_of_its_own_largest_number(format: Format, seed: int) -> None:
    assert seen(numbers(3, 257, seed=seed), format).sums[3] == 0


def test_numbers_saturate_under_scales_that_were_rounded_down() -> None:
    # floor(log2 7) is that of 4 in E2M1: the scale is one, and 7 becomes 6.
    x = torch.tensor([[7.0, -7.0, 6.0, 5.0, 0.2, 0.0]])
    watch = seen(x, MX(element=E2M1, rounding="down"))
    assert watch.sums[:NUM_SUMS].tolist() == pytest.approx([5, 159.04, 1 + 1 + 0 + 1 + 0.04, 2, 1])
    assert histogram(watch) == {0: 5}


def test_scales_are_counted_by_the_power_of_two_below_them_and_beyond_the_ends_at_the_ends() -> None:
    blocks = torch.cat([torch.full((1, 32), size) for size in (448.0, 300.0 * 2.0**5, 2.0**-100, 2.0**100, 0.0)], dim=1)
    watch = seen(blocks, MXFP8)
    assert histogram(watch) == {0: 32, 5: 32, -40: 32, 40: 32}
    # 448 / 3 is between 2^7 and 2^8.
    assert histogram(seen(torch.tensor([[3.0, 1.0]]), FP8_TENSOR)) == {-8: 2}


def test_squares_of_tiny_gradients_count() -> None:
    x = torch.full((2, 32), 2.0**-90)
    assert seen(x, MXFP8).sums[1] == 64 * 2.0**-180


@pytest.mark.parametrize("format", (FP8_TENSOR, FP8_ROWS, MXFP8, NVFP4_ROWS))
@pytest.mark.parametrize("columns", [False, True])
def test_rows_of_experts_add_up_to_those_of_each_expert_alone(format: Format, columns: bool) -> None:
    counts = torch.tensor([128, 0, 256])
    x = numbers(384, 67, seed=3)
    whole, apart = Watch(CPU), Watch(CPU)
    made = (quantise_grouped_columns if columns else quantise_grouped)(x, counts, format)
    whole.add(x.T if columns else x, made)
    for expert, rows in enumerate(x.split(counts.tolist())):
        apart.add(rows.T if columns else rows, made.expert(expert))
    assert float(whole.sums[2]) > 0
    torch.testing.assert_close(whole.sums, apart.sums, rtol=1e-12, atol=0)
    assert whole.largest == apart.largest == x.abs().max()


def test_zeros_and_matrices_without_elements_change_nothing_and_other_shapes_are_refused() -> None:
    watch = Watch(CPU)
    for shape in ((0, 16), (3, 0)):
        watch.add(torch.zeros(shape), quantise(torch.zeros(shape), MXFP8))
    zeros = torch.zeros(2, 64)
    watch.add(zeros, quantise(zeros, MXFP8))
    assert not watch.sums.any() and watch.largest == 0
    assert watch.sums.shape == (NUM_WATCHED,)
    with pytest.raises(ValueError, match=r"shape \(2, 3\)"):
        watch.add(torch.zeros(2, 3), quantise(torch.zeros(3, 2), MXFP8))


def test_what_is_not_finite_shows() -> None:
    x = torch.tensor([[1.0, math.inf, 2.0]])
    watch = seen(x, FP8_TENSOR)
    assert watch.sums[0] == 3 and math.isnan(watch.sums[2]) and math.isinf(watch.largest)
    assert histogram(watch) == {}


def test_bfloat16_operands_and_an_expected_largest_of_a_matrix_each() -> None:
    x = numbers(2, 3, 19).bfloat16()
    amax = torch.tensor([448.0, 1.0]).view(2, 1, 1)
    made = quantise(x, FP8_TENSOR, amax=amax)
    watch = Watch(CPU)
    watch.add(x, made)
    exact = x.double().numpy()
    assert watch.sums[3] == (np.abs(exact[0]) > 448).sum() + (np.abs(exact[1]) > 1).sum() > 0
    assert made.format == FP8_TENSOR and FP8_TENSOR.element is E4M3
