"""Matrices in low precision against plain loops over blocks with numpy and ml_dtypes, worked vectors, and error bounds."""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from core.precision.elements import E2M1, E4M3, E5M2
from core.precision.formats import (
    FP8_ROWS,
    FP8_TENSOR,
    FP8_TENSOR_GRADIENT,
    FP8_WEIGHT,
    MX,
    MXFP8,
    NVFP4_ROWS,
    NVFP4_WEIGHT,
    Blocks,
    Format,
    PerTensor,
    Quantised,
    element_of,
    quantise,
    quantise_both,
)
from tests.core.precision.test_elements import NUMPY

FORMATS: dict[str, Format] = {
    "tensor_e4m3": FP8_TENSOR,
    "tensor_e5m2": FP8_TENSOR_GRADIENT,
    "rows_128": FP8_ROWS,
    "weight_128": FP8_WEIGHT,
    "rows_128_power": replace(FP8_ROWS, power_of_two=True),
    "tall": Blocks(element=E5M2, block=(3, 5), power_of_two=False),
    "mxfp8": MXFP8,
    "mxfp8_down": MX(element=E4M3, rounding="down"),
    "mxfp8_e5m2": MX(element=E5M2, rounding="down"),
    "mxfp4": MX(element=E2M1, rounding="up"),
    "nvfp4": NVFP4_ROWS,
    "nvfp4_weight": NVFP4_WEIGHT,
}
# How many rows and columns share a scale; none: all of the matrix.
BLOCKS = {
    **dict.fromkeys(["tensor_e4m3", "tensor_e5m2"], None),
    **dict.fromkeys(["rows_128", "rows_128_power"], (1, 128)),
    **dict.fromkeys(["mxfp8", "mxfp8_down", "mxfp8_e5m2", "mxfp4"], (1, 32)),
    "weight_128": (128, 128),
    "tall": (3, 5),
    "nvfp4": (1, 16),
    "nvfp4_weight": (16, 16),
}
SQUARE = ["tensor_e4m3", "tensor_e5m2", "weight_128", "nvfp4_weight"]
f32 = np.float32


def draw(*shape: int, number: int = 0) -> Tensor:
    """Numbers of very different sizes, some of them zero."""
    generator = torch.Generator().manual_seed(1000 * number + sum(shape))
    x = torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))
    return x.masked_fill(torch.rand(shape, generator=generator) < 0.05, 0.0)


def exponent_of(number: float) -> int:
    return math.floor(math.log2(number))


def by_loops(x: np.ndarray, name: str) -> np.ndarray:
    """The values that come back, float64: one block after another, each rule written out again."""
    format = FORMATS[name]
    element = element_of(format)
    height, width = BLOCKS[name] or x.shape
    out = np.zeros(x.shape)
    tensor_factor = f32(2688) / f32(np.abs(x).max(initial=0) or 2688)
    for row in range(0, x.shape[0], height):
        for column in range(0, x.shape[1], width):
            block = x[row : row + height, column : column + width]
            amax = f32(np.abs(block).max())
            if amax == 0:
                continue
            if name.startswith("nvfp4"):
                code = (amax / f32(6) * tensor_factor).astype(ml_dtypes.float8_e4m3fn).astype(f32)
                scale = code * (f32(1) / tensor_factor)
                factor = f32(0) if scale == 0 else f32(1) / scale
            elif name.startswith("mx"):
                up = isinstance(format, MX) and format.rounding == "up"
                power = (
                    math.ceil(math.log2(amax / element.largest))
                    if up
                    else exponent_of(float(amax)) - element.max_exponent
                )
                scale, factor = f32(2.0**power), f32(2.0**-power)
            else:
                factor = f32(element.largest) / amax
                if name.endswith("power"):
                    factor = f32(2.0 ** exponent_of(float(factor)))
                scale = f32(1) / factor
            codes = np.clip(block * factor, -element.largest, element.largest).astype(NUMPY[element.name])
            out[row : row + height, column : column + width] = codes.astype(np.float64) * np.float64(scale)
    return out


@pytest.mark.parametrize("shape", [(1, 1), (2, 32), (3, 33), (16, 47), (17, 131), (130, 257)])
@pytest.mark.parametrize("name", FORMATS)
def test_what_comes_back_equals_loops_over_blocks(name: str, shape: tuple[int, int]) -> None:
    x = draw(*shape)
    got = quantise(x, FORMATS[name])
    truth = by_loops(x.numpy(), name)
    # Only the product of two scales and the last multiplication are rounded, to float32.
    np.testing.assert_allclose(got.dequantise(torch.float64).numpy(), truth, rtol=2e-7, atol=0)
    np.testing.assert_allclose(got.dequantise().numpy(), truth, rtol=2e-7, atol=0)


def test_a_block_of_mxfp4_by_hand() -> None:
    """amax 12 = 1.5 · 2^3, of which E2M1 takes 2^2: the scale is 2. 5.5, 5, -4.5, 2.5 and 0.25 lie between 6|4, 6|4, -4|-6, 2|3, 0|0.5."""
    x = torch.zeros(1, 32)
    x[0, :9] = torch.tensor([12.0, 11.0, 10.0, -9.0, 5.0, 1.0, 0.5, -0.25, 8.0])
    got = quantise(x, MX(element=E2M1, rounding="down"))
    assert got.scales.view(torch.uint8).tolist() == [[128]]
    assert got.codes[0, :10].tolist() == [7, 7, 6, 14, 4, 1, 0, 8, 6, 0]
    assert got.data[0, :5].tolist() == [0x77, 0xE6, 0x14, 0x80, 0x06]
    assert got.dequantise()[0, :9].tolist() == [12.0, 12.0, 8.0, -8.0, 4.0, 1.0, 0.0, -0.0, 8.0]


def test_a_block_of_mxfp8_by_hand_saturates_when_rounded_down_and_not_when_rounded_up() -> None:
    x = torch.zeros(1, 40)
    x[0, :3], x[0, 39] = torch.tensor([500.0, -250.0, 0.001]), 3.0
    down, up = quantise(x, MX(element=E4M3, rounding="down")), quantise(x, MXFP8)
    assert down.scales.view(torch.uint8).tolist() == [[127, 127 - 7]]
    assert up.scales.view(torch.uint8).tolist() == [[128, 127 - 7]]
    # Next to 250: 240 and 256. 0.001 is 0.512 of the smallest number of the first, 0.256 of that of the second.
    assert down.dequantise()[0, :3].tolist() == [448.0, -256.0, 2.0**-9]
    assert up.dequantise()[0, :3].tolist() == [512.0, -256.0, 0.0]
    assert down.dequantise()[0, 39] == up.dequantise()[0, 39] == 3.0


def test_the_two_levels_of_nvfp4_by_hand() -> None:
    """The tensor's amax 2688 = 6 · 448 makes its scale 1; the second block's 1.6 / 6 becomes 0.28125, of which 1.6 is 5.69."""
    x = torch.zeros(1, 33)
    x[0, 0], x[0, 1], x[0, 32] = 2688.0, -1000.0, 0.001
    x[0, 16:20] = torch.tensor([1.6, -0.7, 0.3, 0.1])
    got = quantise(x, NVFP4_ROWS)
    assert got.tensor_scale is not None and got.tensor_scale.tolist() == [[1.0]]
    assert got.scales.float().tolist() == [[448.0, 0.28125, 0.0]]
    # -1000 / 448 = -2.23, nearest -2; -0.7 / 0.28125 = -2.49, nearest -2; 1.07 -> 1; 0.36 -> 0.5.
    assert got.dequantise()[0, [0, 1, 16, 17, 18, 19, 32]].tolist() == [
        2688.0,
        -896.0,
        1.6875,
        -0.5625,
        0.28125,
        0.140625,
        0.0,
    ]


# Half a distance of neighbours: relative to the number, and relative to the scale below the normal numbers.
HALF = {"e4m3": (2.0**-4, 2.0**-10), "e5m2": (2.0**-3, 2.0**-17), "e2m1": (2.0**-2, 2.0**-2)}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_number_is_further_off_than_half_the_distance_of_neighbours(name: str, dtype: torch.dtype) -> None:
    x = (torch.randn(64, 256, generator=torch.Generator().manual_seed(8)) * 3).to(dtype)
    got = quantise(x, FORMATS[name])
    relative, absolute = HALF[element_of(FORMATS[name]).name]
    height, width = BLOCKS[name] or x.shape
    scales = got.scales.float() * (1.0 if got.tensor_scale is None else got.tensor_scale)
    scales = scales.repeat_interleave(height, 0)[:64].repeat_interleave(width, 1)[:, :256]
    # Rounding the shared exponent down lets 448 stand for up to 512, an eighth off: twice the half distance.
    relative *= 2 if name == "mxfp8_down" else 1
    bound = torch.maximum(x.double().abs() * relative, scales.double() * absolute) * (1 + 2**-20)
    error = (got.dequantise(torch.float64) - x.double()).abs()
    assert (error <= bound).all()
    assert error.max() > 0.3 * bound[error == error.max()].max()  # the bound is no idle one


@pytest.mark.parametrize("name", SQUARE)
@pytest.mark.parametrize("shape", [(5, 7), (33, 130), (3, 16, 35)])
def test_a_weight_and_its_transpose_have_the_same_codes_and_scales(name: str, shape: tuple[int, ...]) -> None:
    weight = draw(*shape)
    rows, columns = quantise_both(weight, FORMATS[name])
    same(columns, quantise(weight.mT.contiguous(), FORMATS[name]))
    assert torch.equal(columns.dequantise(), rows.dequantise().mT)
    same(columns.transposed(), rows)


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in SQUARE])
def test_the_column_wise_copy_has_its_blocks_along_the_columns(name: str) -> None:
    x = draw(45, 70)
    rows, columns = quantise_both(x, FORMATS[name])
    same(rows, quantise(x, FORMATS[name]))
    np.testing.assert_allclose(columns.dequantise().numpy(), by_loops(x.T.numpy(), name), rtol=2e-7, atol=0)
    with pytest.raises(ValueError, match="quantise the transposed tensor"):
        rows.transposed()


def test_copies_that_are_rounded_stochastically_take_their_own_noise() -> None:
    x = draw(32, 48)
    noise = torch.rand(32, 48, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    other = torch.rand(48, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows, columns = quantise_both(x, NVFP4_ROWS, noise=noise, column_noise=other)
    same(rows, quantise(x, NVFP4_ROWS, noise=noise))
    same(columns, quantise(x.T.contiguous(), NVFP4_ROWS, noise=other))


def same(a: Quantised, b: Quantised) -> None:
    """Bit for bit."""
    assert a.shape == b.shape and a.format == b.format
    assert a.data.dtype == b.data.dtype and a.scales.dtype == b.scales.dtype
    assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
    assert a.scales.shape == b.scales.shape
    assert torch.equal(a.scales.float(), b.scales.float())
    if a.tensor_scale is None or b.tensor_scale is None:
        assert a.tensor_scale is b.tensor_scale
    else:
        assert torch.equal(a.tensor_scale, b.tensor_scale)


@pytest.mark.parametrize("name", FORMATS)
def test_matrices_of_a_stack_are_quantised_each_by_itself(name: str) -> None:
    experts = draw(3, 18, 37) * torch.tensor([1.0, 100.0, 0.01])[:, None, None]
    stack = quantise(experts, FORMATS[name])
    for index in range(3):
        alone = quantise(experts[index], FORMATS[name])
        tensor_scale = None if stack.tensor_scale is None else stack.tensor_scale[index]
        same(
            replace(
                stack, data=stack.data[index], scales=stack.scales[index], tensor_scale=tensor_scale, shape=(18, 37)
            ),
            alone,
        )


@pytest.mark.parametrize("name", FORMATS)
def test_a_short_last_block_is_one_that_zeros_fill(name: str) -> None:
    x = draw(19, 45)
    filled = torch.zeros(256, 256)
    filled[:19, :45] = x
    assert torch.equal(quantise(filled, FORMATS[name]).dequantise()[:19, :45], quantise(x, FORMATS[name]).dequantise())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(0, 0), (0, 7), (7, 0), (2, 0, 33), (0, 3, 3)])
def test_tensors_without_elements_come_back(name: str, shape: tuple[int, ...]) -> None:
    got = quantise(torch.zeros(shape), FORMATS[name])
    assert got.dequantise().shape == shape
    if isinstance(FORMATS[name], PerTensor):
        assert got.scales.tolist() == torch.ones(*shape[:-2], 1, 1).tolist()


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_come_back_as_zeros_with_their_signs(name: str) -> None:
    x = torch.zeros(3, 40)
    x[1] = -0.0
    back = quantise(x, FORMATS[name]).dequantise()
    assert torch.equal(back, x) and torch.equal(back.signbit(), x.signbit())


@pytest.mark.parametrize("name", FORMATS)
def test_the_smallest_and_the_largest_float32_numbers_give_no_nan(name: str) -> None:
    for size in (2.0**-149, 1e-40, torch.finfo(torch.float32).max):
        x = torch.full((2, 33), size)
        back = quantise(x, FORMATS[name]).dequantise(torch.float64)
        assert not back.isnan().any() and (back <= 1.2 * x.double()).all()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_makes_its_block_nan_and_no_other(name: str, bad: float) -> None:
    x = draw(40, 300) + 1
    x[33, 290] = bad
    back = quantise(x, FORMATS[name]).dequantise()
    whole = BLOCKS[name] is None or name.startswith("nvfp4")
    height, width = (40, 300) if whole else BLOCKS[name] or (0, 0)
    expected = torch.zeros(40, 300, dtype=torch.bool)
    row, column = 33 // height * height, 290 // width * width
    expected[row : row + height, column : column + width] = True
    assert torch.equal(back.isnan(), expected)


@pytest.mark.parametrize("format", [FP8_TENSOR, FP8_TENSOR_GRADIENT, NVFP4_ROWS], ids=["e4m3", "e5m2", "nvfp4"])
def test_what_is_not_finite_shows_under_a_given_amax_too(format: Format) -> None:
    x = torch.ones(2, 16)
    assert quantise(x, format, amax=torch.tensor(2.0)).dequantise().isfinite().all()
    x[0, 3] = torch.inf
    assert quantise(x, format, amax=torch.tensor(2.0)).dequantise().isnan().all()


@pytest.mark.parametrize("format", [FP8_TENSOR, NVFP4_ROWS], ids=["fp8", "nvfp4"])
def test_pieces_with_the_amax_of_the_whole_have_the_codes_of_the_whole(format: Format) -> None:
    x = draw(12, 64)
    truth = quantise(x, format)
    for rows in (slice(0, 5), slice(5, 12)):
        piece = quantise(x[rows], format, amax=x.abs().max())
        assert torch.equal(piece.codes, truth.codes[rows])


def test_bytes_are_those_of_data_and_scales() -> None:
    x = torch.ones(256, 512)
    numbers = 256 * 512
    bytes_of = {name: quantise(x, FORMATS[name]).num_bytes for name in FORMATS}
    assert bytes_of["tensor_e4m3"] == numbers + 4
    assert bytes_of["rows_128"] == numbers + numbers // 128 * 4
    assert bytes_of["weight_128"] == numbers + 2 * 4 * 4
    assert bytes_of["mxfp8"] == numbers + numbers // 32
    assert bytes_of["nvfp4"] == numbers // 2 + numbers // 16 + 4
    assert bytes_of["nvfp4_weight"] == numbers // 2 + numbers // 256 + 4
    assert quantise(torch.ones(3, 5), NVFP4_ROWS).num_bytes == 3 * 3 + 3 + 4


def test_bfloat16_is_quantised_as_the_float32_that_it_is_and_comes_back_rounded_once() -> None:
    x = draw(8, 48).bfloat16()
    for format in FORMATS.values():
        same(quantise(x, format), quantise(x.float(), format))
    got = quantise(x, MXFP8)
    assert torch.equal(got.dequantise(torch.bfloat16), got.dequantise().bfloat16())


def test_float64_is_not_rounded_to_float32_on_the_way() -> None:
    """Just above half way between 1 and 1.125, by less than float32 can tell: rounding twice would go down, to the even code."""
    x = torch.full((1, 32), 1.0625 + 2.0**-40, dtype=torch.float64)
    x[0, 0] = 448.0
    assert quantise(x, MXFP8).dequantise()[0, 1:].tolist() == [1.125] * 31
    assert quantise(x.float(), MXFP8).dequantise()[0, 1:].tolist() == [1.0] * 31
    narrow = draw(8, 64)
    same(quantise(narrow.double(), MXFP8), quantise(narrow, MXFP8))


def test_wrong_requests_are_refused_with_the_rule() -> None:
    with pytest.raises(ValueError, match="matrices"):
        quantise(torch.ones(32), MXFP8)
    for format in (MXFP8, FP8_ROWS):
        with pytest.raises(ValueError, match="only PerTensor and NVFP4"):
            quantise(torch.ones(2, 32), format, amax=torch.tensor(1.0))
    for shape in ((2,), (1, 2)):  # neither is [2, 1, 1]
        with pytest.raises(ValueError, match="amax of shape"):
            quantise(torch.ones(2, 3, 32), NVFP4_ROWS, amax=torch.ones(shape))
    with pytest.raises(ValueError, match="noise of shape"):
        quantise(torch.ones(3, 32), MXFP8, noise=torch.ones(32))
    with pytest.raises(ValueError, match="8 bits"):
        PerTensor(element=E2M1)
