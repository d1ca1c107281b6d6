"""Products by torch's scaled ones, held to the reference: on this processor where torch has them, by a stand-in of its documents elsewhere."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from core.config.recipe import RECIPES, Recipe
from core.precision.backends.choose import Kind, pairs
from core.precision.backends.layouts import ALIGNMENT, padded, swizzled
from core.precision.backends.machine import Machine
from core.precision.backends.scaled import Scaled
from core.precision.elements import E4M3, E5M2
from core.precision.formats import MXFP8, NVFP4_ROWS, NVFP4_WEIGHT, Blocks, Format, PerTensor, Quantised, quantise
from core.precision.grouped import Grouped, quantise_grouped, quantise_grouped_columns
from core.precision.products import ProductsBackend, Reference
from tests.core.numbers import draw
from tests.core.precision.scaled_case import scaled_grouped_mm, scaled_mm

CPU = Machine(kind="cpu", name="this processor")
HOPPER = Machine(kind="cuda", name="H200", capability=(9, 0), cuda=(12, 9))
BLACKWELL = Machine(kind="cuda", name="B200", capability=(10, 0), cuda=(13, 0))
ADA = Machine(kind="cuda", name="L40", capability=(8, 9), cuda=(13, 0))
TENSOR, GRADIENT = PerTensor(element=E4M3), PerTensor(element=E5M2)
TILES = Blocks(element=E4M3, block=(1, 128), power_of_two=True)
SQUARES = Blocks(element=E4M3, block=(128, 128), power_of_two=True)
ANY_TILES, ANY_SQUARES = replace(TILES, power_of_two=False), replace(SQUARES, power_of_two=False)
# Of each machine the pairs that its matrix units multiply.
PAIRS = [
    (ADA, TENSOR, TENSOR),
    (HOPPER, TENSOR, TENSOR),
    (HOPPER, GRADIENT, TENSOR),
    (HOPPER, ANY_TILES, ANY_SQUARES),
    (HOPPER, ANY_SQUARES, ANY_TILES),
    (HOPPER, TILES, TILES),
    (BLACKWELL, GRADIENT, TENSOR),
    (BLACKWELL, TILES, SQUARES),
    (BLACKWELL, TILES, TILES),
    (BLACKWELL, MXFP8, MXFP8),
    (BLACKWELL, NVFP4_ROWS, NVFP4_ROWS),
    (BLACKWELL, NVFP4_ROWS, NVFP4_WEIGHT),
]
SHAPES = [
    (1, 1, 1),
    (5, 7, 11),
    (128, 128, 128),
    (131, 257, 389),
    (16, 48, 640),
    (44, 16, 1376),
    (0, 16, 32),
    (3, 0, 32),
    (16, 16, 0),
]
COUNTS = [(32, 0, 160, 96), (0, 0, 64), (0, 0)]
WHOLE_COUNTS = [(128, 0, 256), (0, 0)]  # of blocks of 128 along the rows


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's products as its documents have them, on this processor."""
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    monkeypatch.setattr(F, "scaled_grouped_mm", scaled_grouped_mm)


def numbers(seed: int, *shape: int) -> Tensor:
    """Neighbours of sizes far apart, so that a scale in a wrong place shows."""
    x = draw(seed, *shape)
    rows = torch.exp2(draw(seed + 1, *shape[:-1], 1).mul(3).round())
    columns = torch.exp2(draw(seed + 2, -(-shape[-1] // 16)).mul(3).round()).repeat_interleave(16)[: shape[-1]]
    return (x * rows * columns).float()


def check(got: Tensor, truth: Tensor, dtype: torch.dtype, share: float = 0.0) -> None:
    """The stand-ins add in float64, and so only the last rounding differs from float64's, and a share of the largest element."""
    assert got.dtype == dtype and got.shape == truth.shape
    assert torch.equal(got.isnan(), truth.isnan())
    error = (got.double() - truth.double()).abs().nan_to_num(0.0)
    sizes = truth.double().abs().nan_to_num(0.0)
    largest = float(sizes.max()) if sizes.numel() else 0.0
    assert bool((error <= torch.finfo(dtype).eps * sizes + share * largest).all())


@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize(("machine", "a", "b"), PAIRS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_the_references(machine: Machine, a: Format, b: Format, shape: tuple[int, int, int]) -> None:
    m, n, s = shape
    left, right = quantise(numbers(1, m, s), a), quantise(numbers(2, n, s), b)
    scaled = Scaled(machine=machine, align=1)
    for dtype in (torch.bfloat16, torch.float32):
        assert scaled.missing(a, b, dtype) is None
        check(scaled.product(left, right, dtype), Reference().product(left, right, torch.float64), dtype)


def all_products(
    backend: ProductsBackend, kind: Kind, operands: tuple[Grouped, Quantised | Grouped], dtype: torch.dtype
) -> Tensor:
    rows, other = operands
    if kind == "of_rows":
        assert isinstance(other, Quantised)
        return backend.of_rows(rows, other, dtype)
    assert isinstance(other, Grouped)
    return backend.of_weights(rows, other, dtype)


def experts(
    kind: Kind, counts: tuple[int, ...], a: Format, b: Format, n: int, s: int
) -> tuple[Grouped, Quantised | Grouped]:
    counts_E, rows = torch.tensor(counts), sum(counts)
    if kind == "of_rows":
        return quantise_grouped(numbers(3, rows, s), counts_E, a), quantise(numbers(4, len(counts), n, s), b)
    left, right = numbers(5, rows, n), numbers(6, rows, s)
    return quantise_grouped_columns(left, counts_E, a), quantise_grouped_columns(right, counts_E, b)


@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize("kind", ["of_rows", "of_weights"])
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(("machine", "a", "b"), PAIRS)
def test_experts_products_are_the_references(kind: Kind, grouped: bool, machine: Machine, a: Format, b: Format) -> None:
    weights_of_experts = {SQUARES, ANY_SQUARES, NVFP4_WEIGHT}
    if a in weights_of_experts or (kind == "of_weights" and b in weights_of_experts):
        return  # blocks of several rows are for weights
    if kind == "of_rows":  # which may be any number
        operands = experts(kind, (44, 0, 13), a, b, 37, 96)
        truth = all_products(Reference(), kind, operands, torch.float64)
        check(
            all_products(Scaled(machine=machine, align=1, grouped=grouped), kind, operands, torch.bfloat16),
            truth,
            torch.bfloat16,
        )
    for counts in WHOLE_COUNTS if kind == "of_weights" and isinstance(a, Blocks) else COUNTS:
        for n, s in ((37, 389), (144, 64)):
            operands = experts(kind, counts, a, b, n, s)
            scaled = Scaled(machine=machine, align=32, grouped=grouped)
            truth = all_products(Reference(), kind, operands, torch.float64)
            check(all_products(scaled, kind, operands, torch.bfloat16), truth, torch.bfloat16)


def test_products_of_all_experts_run_in_one_call_where_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_by_one(*_: object, **__: object) -> Tensor:
        raise AssertionError("one by one")

    monkeypatch.setattr(F, "scaled_mm", one_by_one)
    monkeypatch.setattr(F, "scaled_grouped_mm", scaled_grouped_mm)
    kinds: tuple[Kind, Kind] = ("of_rows", "of_weights")
    for machine, format in ((HOPPER, TENSOR), (BLACKWELL, TENSOR), (BLACKWELL, MXFP8)):
        for kind in kinds:
            operands = experts(kind, (32, 64), format, format, 16, 32)
            all_products(Scaled(machine=machine, align=32), kind, operands, torch.bfloat16)
            with pytest.raises(AssertionError, match="one by one"):
                all_products(Scaled(machine=machine, align=32), kind, operands, torch.float32)
    operands = experts("of_weights", (17, 64), TENSOR, TENSOR, 16, 32)
    with pytest.raises(AssertionError, match="one by one"):
        all_products(Scaled(machine=HOPPER, align=1), "of_weights", operands, torch.bfloat16)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("a", "b"), [(TENSOR, TENSOR), (GRADIENT, TENSOR), (GRADIENT, GRADIENT)])
def test_torchs_own_product_on_this_processor_is_the_references(
    a: Format, b: Format, shape: tuple[int, int, int]
) -> None:
    m, n, s = shape
    left, right = quantise(numbers(7, m, s), a), quantise(numbers(8, n, s), b)
    for dtype in (torch.float32, torch.bfloat16):
        got = Scaled(machine=CPU, align=1).product(left, right, dtype)
        truth = Reference().product(left, right, torch.float64)
        sizes = left.dequantise(torch.float64).abs() @ right.dequantise(torch.float64).abs().T
        bound = s * 2.0**-24 * sizes + torch.finfo(dtype).eps * truth.abs()
        assert got.dtype == dtype and bool(((got.double() - truth).abs() <= bound).all())


@pytest.mark.parametrize("kind", ["of_rows", "of_weights"])
def test_torchs_own_products_of_experts_on_this_processor_are_the_references(kind: Kind) -> None:
    operands = experts(kind, (3, 0, 7), GRADIENT, TENSOR, 5, 19)
    got = all_products(Scaled(machine=CPU, align=1), kind, operands, torch.float32)
    truth = all_products(Reference(), kind, operands, torch.float64)
    assert float((got.double() - truth).abs().max()) <= 1e-5 * float(truth.abs().max())


@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize(
    ("machine", "format"), [(HOPPER, TENSOR), (HOPPER, TILES), (BLACKWELL, TILES), (BLACKWELL, MXFP8)]
)
def test_what_was_not_finite_never_comes_out_finite(machine: Machine, format: Format) -> None:
    x = numbers(9, 40, 200)
    x[3, 5] = math.inf
    left, right = quantise(x, format), quantise(numbers(10, 24, 200), format)
    got = Scaled(machine=machine, align=1).product(left, right, torch.bfloat16)
    truth = Reference().product(left, right, torch.float64)
    assert bool(truth[3].isnan().all())
    check(got, truth, torch.bfloat16)


def test_scales_stand_in_tiles_as_cublas_has_them() -> None:
    """Worked from the document's figure: 16 bytes hold four scales each of the rows 0, 32, 64 and 96."""
    scales = (
        torch.arange(128 * 4, dtype=torch.int16).remainder(251).to(torch.uint8).view(128, 4).view(torch.float8_e8m0fnu)
    )
    out = swizzled(scales).view(torch.uint8)
    codes = scales.view(torch.uint8)
    assert out[:16].tolist() == codes[[0, 32, 64, 96]].flatten().tolist()
    assert out[16:20].tolist() == codes[1].tolist() and out[508:].tolist() == codes[127].tolist()
    assert swizzled(scales[:1, :1]).numel() == 512 and swizzled(scales[:0]).numel() == 0


@pytest.mark.parametrize("format", [TENSOR, ANY_TILES, ANY_SQUARES, MXFP8, NVFP4_ROWS, NVFP4_WEIGHT])
def test_padding_adds_zeros_and_changes_no_number(format: Format) -> None:
    x = quantise(numbers(11, 21, 35), format)
    wide = padded(x, 16, 32)
    assert wide.shape == (32, 64)
    values = wide.dequantise()
    assert torch.equal(values[:21, :35], x.dequantise())
    assert not values[21:].any() and not values[:, 35:].any()
    assert padded(wide, 16, 32) is wide


@pytest.mark.parametrize(
    ("machine", "a", "b", "reason"),
    [
        (HOPPER, MXFP8, MXFP8, "it needs compute capability 10.0 or newer, and H200 has 9.0"),
        (HOPPER, NVFP4_ROWS, NVFP4_WEIGHT, "compute capability 10.0"),
        (ADA, TILES, SQUARES, "it needs compute capability 9.0 or newer, and L40 has 8.9"),
        (replace(ADA, capability=(8, 0)), TENSOR, TENSOR, "compute capability 8.9 or newer"),
        (replace(HOPPER, cuda=(12, 8)), TILES, SQUARES, "CUDA 12.9 or newer, and this torch was built for 12.8"),
        (BLACKWELL, ANY_TILES, ANY_SQUARES, "must be powers of two"),
        (HOPPER, SQUARES, SQUARES, "must be in blocks of 1x128"),
        (HOPPER, GRADIENT, GRADIENT, "two operands of e5m2"),
        (HOPPER, TENSOR, TILES, "no matrix unit multiplies e4m3 with one scale by e4m3 in blocks of 1x128"),
        (CPU, MXFP8, MXFP8, "it needs compute capability 10.0 or newer, and this processor has none"),
        (CPU, TILES, TILES, "and this processor has none"),
        (Machine(kind="hip", name="MI300"), TENSOR, TENSOR, "NVIDIA's GPUs, and this one is AMD's"),
        (Machine(kind="other", name="a device of kind mps"), TENSOR, TENSOR, "compute capability 8.9"),
    ],
)
def test_what_a_machine_lacks_is_said_by_name(machine: Machine, a: Format, b: Format, reason: str) -> None:
    found = Scaled(machine=machine, align=32).missing(a, b, torch.bfloat16)
    assert found is not None and reason in found


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_every_recipes_rows_are_aligned_as_its_back_end_wants(recipe: Recipe) -> None:
    """Of what its weight gradients sum over: padding a batch of 44 rows to 16 or 32 is the recipe's, and to more the back end's."""
    for machine in (HOPPER, BLACKWELL):
        scaled = Scaled(machine=machine, align=recipe.align)
        for a, b, kinds in pairs(recipe):
            if scaled.missing(a, b, torch.bfloat16) is None and "of_weights" in kinds:
                assert recipe.align % ALIGNMENT[scaled.way(a)].summed == 0
