"""SwiGLU times a row's weight rounded in one pass in Triton, against the same activation written and then quantised, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from core.config.architecture import SWIGLU
from core.kernels.activation import rounded_forward
from core.precision.activation import swiglu_amax, swiglu_quantised
from core.precision.elements import E2M1, E4M3, E5M2
from core.precision.formats import MX, NVFP4, Blocks, Format, PerTensor
from core.precision.grouped import Grouped, quantise_grouped
from tests.core.kernels.triton_case import kernels
from tests.core.numbers import draw

pytest.importorskip("triton", minversion="3.7")

FORMATS: dict[str, Format] = {
    "tensor_e4m3": PerTensor(element=E4M3),
    "tensor_e5m2": PerTensor(element=E5M2),
    "rows": Blocks(element=E4M3, block=(1, 128), power_of_two=False),
    "rows_power_of_two": Blocks(element=E4M3, block=(1, 128), power_of_two=True),
    "mxfp8": MX(element=E4M3, rounding="up"),
    "mxfp8_down": MX(element=E5M2, rounding="down"),
    "mxfp4": MX(element=E2M1, rounding="up"),
    "nvfp4": NVFP4(block=(1, 16)),
}
WHOLE = ("tensor_e4m3", "tensor_e5m2", "nvfp4")
COUNTS = [3, 0, 7, 1]
# Rows of experts, and width: none, one, primes, whole blocks, more than a tile has.
CASES = [([0, 0], 16), ([1], 1), ([5, 2], 0), (COUNTS, 37), (COUNTS, 128), ([2, 1], 1153)]


def operands(rows: int, ffn: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers of many sizes, of both signs; and weights, of both signs too, as a router's are not."""
    product = draw(0, rows, 2 * ffn) * draw(1, rows, 2 * ffn).exp()
    return product.to(dtype), draw(2, rows, dtype=torch.float32)


def same(got: Tensor, truth: Tensor) -> None:
    assert got.dtype == truth.dtype and got.shape == truth.shape
    got, truth = (x.cpu().clone(memory_format=torch.contiguous_format) for x in (got, truth))
    assert torch.equal(got.view(torch.uint8), truth.view(torch.uint8))


def check(got: Grouped, truth: Grouped) -> None:
    """Every bit."""
    assert got.shape == truth.shape and got.format == truth.format and got.axis == truth.axis
    same(got.data, truth.data)
    same(got.scales, truth.scales)
    if truth.tensor_scale_E is None:
        assert got.tensor_scale_E is None
    else:
        assert got.tensor_scale_E is not None
        same(got.tensor_scale_E, truth.tensor_scale_E)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("counts", "ffn"), CASES)
@pytest.mark.parametrize("name", FORMATS)
def test_one_pass_gives_the_bits_of_two(
    device: torch.device, name: str, counts: list[int], ffn: int, dtype: torch.dtype
) -> None:
    product, weight = (x.to(device) for x in operands(sum(counts), ffn, dtype))
    counts_E = torch.tensor(counts, device=device)
    amax_E = (
        torch.linspace(0.5, 900.0, len(counts), device=device) if name in WHOLE and dtype == torch.float32 else None
    )
    with kernels("triton"):
        got = swiglu_quantised(product, weight, counts_E, FORMATS[name], amax_E=amax_E)
        act = rounded_forward(product, SWIGLU, weight)
    check(
        got,
        quantise_grouped(act.cpu(), counts_E.cpu(), FORMATS[name], amax_E=amax_E if amax_E is None else amax_E.cpu()),
    )


@pytest.mark.parametrize("name", FORMATS)
def test_the_definition_is_the_activation_and_then_the_format(device: torch.device, name: str) -> None:
    """By torch's functions alone; Triton's exponential differs from torch's by less than what is rounded away here."""
    (product, weight), counts_E = operands(sum(COUNTS), 37, torch.float32), torch.tensor(COUNTS)
    gate, up = product.double().chunk(2, dim=1)
    act = (gate / (1 + (-gate).exp()) * up * weight.double()[:, None]).float()
    truth = quantise_grouped(act, counts_E, FORMATS[name]).dequantise(torch.float64)
    for kind, place in (("reference", torch.device("cpu")), ("triton", device)):
        with kernels(kind):
            got = swiglu_quantised(product.to(place), weight.to(place), counts_E.to(place), FORMATS[name])
        off = (got.dequantise(torch.float64).cpu() - truth).abs() > 1e-5 * truth.abs()
        assert off.double().mean() < 0.01


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of the interpreter
def test_what_is_not_finite_never_comes_back_finite(
    device: torch.device, name: str, given: bool, number: float
) -> None:
    product, weight = operands(sum(COUNTS), 37, torch.float32)
    product[4, 40] = number
    amax_E = torch.full((len(COUNTS),), 30.0) if given and name in WHOLE else None
    counts_E = torch.tensor(COUNTS)
    with kernels("triton"):
        got = swiglu_quantised(
            product.to(device), weight.to(device), counts_E.to(device), FORMATS[name],
            amax_E=None if amax_E is None else amax_E.to(device),
        )  # fmt: skip
        act = rounded_forward(product.to(device), SWIGLU, weight.to(device))
    truth = quantise_grouped(act.cpu(), counts_E, FORMATS[name], amax_E=amax_E).dequantise()
    assert not truth[4, 3].isfinite() and truth[:3].isfinite().all()
    assert torch.equal(got.dequantise().cpu().isnan(), truth.isnan())
    assert torch.equal(got.dequantise().cpu().nan_to_num(nan=0.0), truth.nan_to_num(nan=0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_of_each_expert_is_found_without_writing_the_activation(
    device: torch.device, dtype: torch.dtype
) -> None:
    product, weight = operands(sum(COUNTS), 37, dtype)
    for kind, place in (("reference", torch.device("cpu")), ("triton", device)):
        with kernels(kind):
            got = swiglu_amax(product.to(place), weight.to(place), torch.tensor(COUNTS, device=place)).cpu()
            act = rounded_forward(product.to(place), SWIGLU, weight.to(place)).cpu().float()
        assert got.tolist() == [float(piece.abs().max()) if len(piece) else 0.0 for piece in act.split(COUNTS)]


def test_rows_without_a_weight_and_halves_of_wider_rows_are_read_right(device: torch.device) -> None:
    wide = operands(11, 40, torch.bfloat16)[0].to(device)
    counts_E = torch.tensor(COUNTS, device=device)
    with kernels("triton"):
        got = swiglu_quantised(wide[:, 6:], None, counts_E, FORMATS["mxfp8"])
        turned = swiglu_quantised(wide[:, 6:].T.contiguous().T, None, counts_E, FORMATS["mxfp8"])
        act = rounded_forward(wide[:, 6:].contiguous(), SWIGLU, None)
    truth = quantise_grouped(act.cpu(), counts_E.cpu(), FORMATS["mxfp8"])
    check(got, truth)
    check(turned, truth)


def test_what_formats_refuse_is_refused(device: torch.device) -> None:
    product, weight = (x.to(device) for x in operands(11, 32, torch.float32))
    counts_E, amax_E = torch.tensor(COUNTS, device=device), torch.ones(4, device=device)
    square = Blocks(element=E4M3, block=(128, 128), power_of_two=False)
    for kind in ("reference", "triton"):
        with kernels(kind):
            if device.type == "cpu":  # the kernels let counts be that a GPU holds
                with pytest.raises(ValueError, match="counts sum to 11, and there are 10 rows"):
                    swiglu_quantised(product[:10], weight[:10], counts_E, FORMATS["mxfp8"])
            with pytest.raises(ValueError, match="blocks of one row"):
                swiglu_quantised(product, weight, counts_E, square)
            with pytest.raises(ValueError, match="cannot be given one"):
                swiglu_quantised(product, weight, counts_E, FORMATS["mxfp8"], amax_E=amax_E)
