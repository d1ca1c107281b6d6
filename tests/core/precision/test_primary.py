"""Weights rounded stretch by stretch: the bits of the whole weight's rounding, wherever the stretches end."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from core.precision.elements import E4M3, E5M2
from core.precision.formats import MX, NVFP4, Blocks, Format, PerTensor, Quantised, quantise
from core.precision.primary import PrimaryWeight, measured, rounded, scales_of, tensor_amax
from core.precision.scales import Scales
from tests.core.precision.recipe_case import draw

FORMATS: dict[str, Format] = {
    "tensor": PerTensor(element=E4M3),
    "tensor e5m2": PerTensor(element=E5M2),
    "128x128": Blocks(element=E4M3, block=(128, 128), power_of_two=False),
    "128x128, powers of two": Blocks(element=E4M3, block=(128, 128), power_of_two=True),
    "16x16": NVFP4(block=(16, 16)),
}
# Less than a block, exactly one, more by one row and an odd number of columns; experts of several blocks, and one row.
SHAPES = ((16, 32), (128, 128), (129, 254), (3, 150, 140), (2, 1, 16), (13, 5, 2))


def stretches(elements: int, cuts: tuple[float, ...]) -> list[tuple[int, int]]:
    """Even places at about these parts of a weight, as neighbours' ends."""
    ends = [0, *(round(elements * cut / 2) * 2 for cut in cuts), elements]
    return list(pairwise(ends))


def by_stretches(
    weight: Tensor, format: Format, cuts: tuple[float, ...], expected: Tensor | None = None
) -> tuple[Scales, Tensor]:
    """The scales and the stored bytes of a weight, of which several ranks have a stretch each."""
    flat, shape = weight.flatten(), tuple(weight.shape)
    pieces = stretches(len(flat), cuts)
    grid = torch.stack([measured(flat[a:b], a, format, shape) for a, b in pieces]).amax(0)
    scales = scales_of(grid, tensor_amax(grid, format), expected, format)
    return scales, torch.cat([rounded(flat[a:b], a, scales, format, shape) for a, b in pieces])


def check(scales: Scales, codes: Tensor, truth: Quantised) -> None:
    assert torch.equal(codes, truth.data.view(torch.uint8).flatten())
    assert torch.equal(scales.stored.float().nan_to_num(nan=-1), truth.scales.float().nan_to_num(nan=-1))
    assert scales.stored.dtype == truth.scales.dtype
    if truth.tensor_scale is not None:
        assert scales.tensor_scale is not None
        torch.testing.assert_close(scales.tensor_scale, truth.tensor_scale, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cuts", [(), (0.5,), (0.01, 0.34, 0.34, 0.97), (0.0, 1.0)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_all_stretches_together_are_the_bits_of_the_whole_weight(name: str, cuts: tuple[float, ...]) -> None:
    for shape in SHAPES:
        for dtype in (torch.float32, torch.float64):
            weight = draw(*shape).to(dtype)
            check(*by_stretches(weight, FORMATS[name], cuts), quantise(weight, FORMATS[name]))


def test_long_weights_are_rounded_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = draw(130, 200)
    for elements in (1, 200, 1000):
        monkeypatch.setattr("core.precision.primary._PIECE", elements)
        for format in FORMATS.values():
            check(*by_stretches(weight, format, (0.3, 0.7)), quantise(weight, format))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_marks_its_block_whoever_has_it(name: str, wrong: float) -> None:
    weight = draw(2, 130, 144)
    weight[1, 129, 7] = wrong
    scales, codes = by_stretches(weight, FORMATS[name], (0.2, 0.6))
    check(scales, codes, quantise(weight, FORMATS[name]))
    assert bool(
        scales.stored.float()[1].isnan().any()
        or (scales.tensor_scale is not None and scales.tensor_scale[1].isnan().all())
    )


def test_zeros_round_to_zeros_and_each_expert_has_a_scale_of_its_own() -> None:
    weight = draw(3, 32, 48)
    weight[1] = 0
    for format in FORMATS.values():
        scales, codes = by_stretches(weight, format, (0.5,))
        check(scales, codes, quantise(weight, format))
        assert not codes.view(3, -1)[1].any() and codes.view(3, -1)[2].any()


def test_delayed_scaling_takes_what_is_expected_but_never_hides_what_is_not_finite() -> None:
    weight, expected = draw(2, 16, 32), torch.tensor([3.0, 0.5]).view(2, 1, 1)
    format = FORMATS["tensor"]
    check(*by_stretches(weight, format, (0.4,), expected), quantise(weight, format, amax=expected))
    weight[0, 0, 0] = math.inf
    scales, _ = by_stretches(weight, format, (0.4,), expected)
    assert scales.stored.isnan().flatten().tolist() == [True, False]


def test_ends_between_the_two_numbers_of_a_byte_are_refused() -> None:
    weight, format = draw(16, 32), FORMATS["16x16"]
    grid = measured(weight.flatten(), 0, format, (16, 32))
    scales = scales_of(grid, tensor_amax(grid, format), None, format)
    for start, stop in ((1, 33), (0, 33)):
        with pytest.raises(ValueError, match="no whole bytes"):
            rounded(weight.flatten()[start:stop], start, scales, format, (16, 32))
    with pytest.raises(ValueError, match="rows of 31"):
        rounded(weight.flatten()[:32], 0, scales, format, (16, 31))


def test_a_transpose_with_the_same_scales_is_made_of_the_rows_and_another_is_kept() -> None:
    weight = draw(32, 64)
    rows = quantise(weight, FORMATS["16x16"])
    one = PrimaryWeight(rows=rows)
    assert one.get(transposed=False) is rows and one.num_bytes == rows.num_bytes
    assert torch.equal(one.get(transposed=True).dequantise(), rows.dequantise().mT)
    mx = MX(element=E4M3, rounding="up")
    two = PrimaryWeight(rows=quantise(weight, mx), columns=quantise(weight.mT.contiguous(), mx))
    assert two.get(transposed=True) is two.columns and two.num_bytes == 2 * (32 * 64 + 32 * 64 // 32)
