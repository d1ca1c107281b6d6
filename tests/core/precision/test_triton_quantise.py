"""Quantising by Triton's kernels against the definitions in torch on the CPU, bit for bit; tests/gpu runs the same on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from core.precision.elements import E2M1, E4M3, E5M2, Element, decode, encode
from core.precision.formats import Format, Quantised, quantise, quantise_both
from core.precision.grouped import Grouped, quantise_grouped, quantise_grouped_columns
from tests.core.kernels.triton_case import CPU, kernels
from tests.core.precision.test_formats import FORMATS, draw

pytest.importorskip("triton", minversion="3.7")

KERNELS = {name: format for name, format in FORMATS.items() if name != "tall"}
OF_TENSOR = ["tensor_e4m3", "tensor_e5m2", "nvfp4", "nvfp4_weight"]
OF_ROWS = [name for name in KERNELS if "weight" not in name]
ELEMENTS = [E4M3, E5M2, E2M1]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of the tensors; where there is a GPU, Triton's kernels run on no other."""
    if torch.cuda.is_available():
        pytest.skip("the GPU runs the kernels here: tests/gpu has the same tests")
    return CPU


@pytest.fixture(autouse=True)
def _numpy_may_overflow() -> Iterator[None]:
    """The interpreter computes with numpy, which warns where a GPU gives infinity as it should."""
    with np.errstate(over="ignore"):
        yield


def same(got: Quantised | Grouped, truth: Quantised | Grouped) -> None:
    """All bits are equal."""
    assert got.shape == truth.shape and got.format == truth.format
    for name in ("data", "scales", "tensor_scale" if isinstance(truth, Quantised) else "tensor_scale_E"):
        one, other = getattr(got, name), getattr(truth, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.shape == other.shape and one.dtype == other.dtype, name
            assert torch.equal(bits(one.cpu()), bits(other)), name


def bits(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def harsh(dtype: torch.dtype) -> Tensor:
    """Rows of every kind, [67, 133]: zeros of both signs, subnormal and very small numbers, the largest."""
    x = draw(67, 133)
    x[0], x[1], x[2] = 0.0, -0.0, x[2] * 2.0**-140
    x[3], x[4] = x[3] * 2.0**-120, x[4].sign() * torch.finfo(dtype).max
    return x.to(dtype)


def check_both(x: Tensor, format: Format, device: torch.device) -> None:
    with kernels("reference"):
        truth = quantise_both(x, format)
    with kernels("triton"):
        got = quantise_both(x.to(device), format)
    for one, other in zip(got, truth, strict=True):
        same(one, other)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (1, 1), (2, 37, 17), (0, 3, 3)])
@pytest.mark.parametrize("name", KERNELS)
def test_both_copies_are_those_of_the_definition(device: torch.device, name: str, shape: tuple[int, ...]) -> None:
    check_both(draw(*shape), KERNELS[name], device)


@pytest.mark.parametrize("name", KERNELS)
def test_harsh_numbers_are_rounded_as_defined(device: torch.device, name: str) -> None:
    check_both(harsh(torch.float32), KERNELS[name], device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["tensor_e5m2", "rows_128", "mxfp8", "nvfp4"])
def test_narrow_numbers_are_rounded_from_what_they_are(device: torch.device, name: str, dtype: torch.dtype) -> None:
    check_both(harsh(dtype), KERNELS[name], device)


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
@pytest.mark.parametrize("name", KERNELS)
def test_what_is_not_finite_is_marked_as_defined(device: torch.device, name: str, bad: float) -> None:
    """The sign of a NaN's code is whatever a processor leaves of it in a product with another NaN."""
    x = draw(2, 19, 35)
    x[1, 17, 33] = bad
    check_both(x, KERNELS[name], device)


@pytest.mark.parametrize("name", ["tensor_e4m3", "rows_128", "mxfp8", "nvfp4", "nvfp4_weight"])
def test_a_transpose_is_read_where_it_lies(device: torch.device, name: str) -> None:
    x, noise = draw(2, 35, 19), torch.rand(2, 35, 19, dtype=torch.float64)
    for drawn in (None, noise):
        with kernels("reference"):
            truth = quantise(x.mT, KERNELS[name], noise=None if drawn is None else drawn.mT)
        with kernels("triton"):
            turned = None if drawn is None else drawn.to(device).mT
            same(quantise(x.to(device).mT, KERNELS[name], noise=turned), truth)


@pytest.mark.parametrize("name", OF_TENSOR)
def test_a_given_amax_stands_for_the_measured_one(device: torch.device, name: str) -> None:
    x = draw(3, 5, 18)
    x[2, 4, 17] = torch.nan
    each = torch.tensor([2.5, 0.0, 1.0]).view(3, 1, 1)
    for amax in (each, torch.tensor(0.3), torch.tensor(-1.0), torch.tensor(torch.inf)):
        with kernels("reference"):
            truth = quantise(x, KERNELS[name], amax=amax)
        with kernels("triton"):
            same(quantise(x.to(device), KERNELS[name], amax=amax.to(device)), truth)


@pytest.mark.parametrize("name", [name for name in KERNELS if name not in ("tensor_e5m2", "mxfp8_down")])
def test_noise_decides_as_defined(device: torch.device, name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x = draw(2, 21, 37)
    noise, other = (torch.rand(shape, generator=generator, dtype=torch.float64) for shape in ((2, 21, 37), (2, 37, 21)))
    with kernels("reference"):
        truth = quantise_both(x, KERNELS[name], noise=noise, column_noise=other)
    with kernels("triton"):
        got = quantise_both(x.to(device), KERNELS[name], noise=noise.to(device), column_noise=other.to(device))
    for one, right in zip(got, truth, strict=True):
        same(one, right)


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda element: element.name)
def test_every_bfloat16_and_every_tie_has_its_code(device: torch.device, element: Element) -> None:
    """Under a scale of one, which an amax of `largest` gives: codes are then of the numbers themselves."""
    values = decode(torch.arange(1 << element.bits).to(torch.uint8), element)
    values = values[values.isfinite()].sort().values
    ties = (values[1:] + values[:-1]) / 2
    beside = [torch.nextafter(ties, torch.tensor(end)) for end in (torch.inf, -torch.inf)]
    all_of_them = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).float()
    numbers = torch.cat([all_of_them, values, ties, *beside])
    for noise in (None, torch.rand(numbers.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)):
        got = codes_of(numbers.to(device), None if noise is None else noise.to(device), element)
        assert torch.equal(got.cpu(), encode(numbers, element, noise=noise))


def codes_of(x: Tensor, noise: Tensor | None, element: Element) -> Tensor:
    """What `encode` of the kernels makes of numbers."""
    from tests.core.precision.triton_codes import launch

    return launch(x, noise, element.name)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", OF_ROWS)
def test_rows_of_experts_are_rounded_as_defined(device: torch.device, name: str, turned: bool) -> None:
    check_grouped(name, [0, 128, 0, 256, 0], turned, device)


@pytest.mark.parametrize("counts", [[3, 0, 1, 7], [0, 0], [13]])
@pytest.mark.parametrize("name", ["tensor_e4m3", "nvfp4", "mxfp8"])
def test_experts_may_have_any_number_of_rows(device: torch.device, name: str, counts: list[int]) -> None:
    check_grouped(name, counts, False, device)


def check_grouped(name: str, counts: list[int], turned: bool, device: torch.device) -> None:
    """With amaxes given, with noise, and with a NaN in one expert."""
    action = quantise_grouped_columns if turned else quantise_grouped
    counts_E, rows = torch.tensor(counts), sum(counts)
    x = draw(rows, 19) * torch.arange(1.0, len(counts) + 1).repeat_interleave(counts_E)[:, None]
    noise = torch.rand((19, rows) if turned else (rows, 19), dtype=torch.float64)
    given = torch.linspace(0.0, 3.0, len(counts)) if name in OF_TENSOR else None
    spoilt = x.clone()
    spoilt.view(-1)[-1:] = torch.nan
    for numbers, amax_E, drawn in ((x, None, None), (x, given, noise), (spoilt, given, None)):
        with kernels("reference"):
            truth = action(numbers, counts_E, KERNELS[name], amax_E=amax_E, noise=drawn)
        with kernels("triton"):
            here = [None if one is None else one.to(device) for one in (amax_E, drawn)]
            got = action(numbers.to(device), counts_E.to(device), KERNELS[name], amax_E=here[0], noise=here[1])
        same(got, truth)
