"""Which back end a recipe's products get, what is said of those that it does not have, and that none is believed unseen."""

from __future__ import annotations

import re
import sys
import warnings
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from core.config.recipe import FP8_CURRENT, MXFP8, NVFP4, RECIPES, InputGradient, Operand, Recipe
from core.errors import ConfigError
from core.kernels.backend import products_backend
from core.precision.backends import choose
from core.precision.backends.choose import Kind, Tried, pairs, products_for, trial
from core.precision.backends.machine import Machine, machine_of
from core.precision.backends.scaled import Scaled
from core.precision.elements import E4M3, E5M2
from core.precision.formats import MXFP8 as MX_FORMAT
from core.precision.formats import NVFP4_ROWS, NVFP4_WEIGHT, Blocks, Format, PerTensor, Quantised, quantise
from core.precision.grouped import Grouped
from core.precision.products import Reference
from tests.core.numbers import draw
from tests.core.precision.scaled_case import scaled_grouped_mm, scaled_mm

CPU = torch.device("cpu")
TENSOR, GRADIENT = PerTensor(element=E4M3), PerTensor(element=E5M2)
TILES = Blocks(element=E4M3, block=(1, 128), power_of_two=True)
SQUARES = Blocks(element=E4M3, block=(128, 128), power_of_two=True)
KINDS: tuple[Kind, ...] = ("product", "of_rows", "of_weights")
HOPPER = Machine(kind="cuda", name="H200", capability=(9, 0), cuda=(12, 9))
BLACKWELL = Machine(kind="cuda", name="B200", capability=(10, 0), cuda=(13, 0))


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """The reference, with a fault in what it is given or in what it gives."""

    fault: Literal["none", "scales", "zeros", "nan", "bits", "dtype", "raises", "one"]

    def missing(self, a: Format, b: Format, dtype: torch.dtype) -> str | None:
        return None

    def product(self, a_MS: Quantised, b_NS: Quantised, dtype: torch.dtype) -> Tensor:
        if self.fault == "scales":
            b_NS = replace(b_NS, scales=b_NS.scales.view(torch.uint8).roll(1, 0).view(b_NS.scales.dtype))
        return self._spoilt(Reference().product(a_MS, b_NS, dtype))

    def of_rows(self, a_RS: Grouped, b_ENS: Quantised, dtype: torch.dtype) -> Tensor:
        if self.fault == "scales":
            b_ENS = replace(b_ENS, scales=b_ENS.scales.view(torch.uint8).roll(1, 0).view(b_ENS.scales.dtype))
        return self._spoilt(Reference().of_rows(a_RS, b_ENS, dtype))

    def of_weights(self, a_NR: Grouped, b_KR: Grouped, dtype: torch.dtype) -> Tensor:
        if self.fault == "scales":
            b_KR = replace(b_KR, scales=b_KR.scales.view(torch.uint8).roll(1, 0).view(b_KR.scales.dtype))
        return self._spoilt(Reference().of_weights(a_NR, b_KR, dtype))

    def _spoilt(self, x: Tensor) -> Tensor:
        match self.fault:
            case "zeros":
                return torch.zeros_like(x)
            case "nan":
                return x * float("nan")
            case "bits":
                return (x.float() * (1 + 2.0**-5)).to(x.dtype)
            case "dtype":
                return x.double()
            case "raises":
                raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nwhen calling")
            case "one":
                x = x.clone()
                x.flatten()[-1] *= -1
        return x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("a", "b"),
    [(TENSOR, TENSOR), (GRADIENT, TENSOR), (TILES, TILES), (TILES, SQUARES), (MX_FORMAT, MX_FORMAT), (NVFP4_ROWS, NVFP4_ROWS), (NVFP4_ROWS, NVFP4_WEIGHT)],
)  # fmt: skip
def test_a_trial_passes_what_is_right_and_names_what_is_wrong(kind: Kind, a: Format, b: Format) -> None:
    if kind == "of_weights" and b in (SQUARES, NVFP4_WEIGHT):
        return  # blocks of several rows are for weights
    for dtype in (torch.bfloat16, torch.float32):
        assert trial(Wrong(fault="none"), kind, a, b, dtype, CPU) is None
    expected = {
        "zeros": "wrong by",
        "nan": "wrong by inf",
        "one": "wrong by",
        "dtype": "torch.float64",
        "raises": "CUBLAS_STATUS_NOT_SUPPORTED",
    }
    for fault, words in expected.items():
        found = trial(Wrong(fault=fault), kind, a, b, torch.bfloat16, CPU)  # type: ignore[arg-type]
        assert found is not None and words in found and "\n" not in found
    one_number = isinstance(b, PerTensor) and kind == "product"
    if not one_number:
        assert "wrong by" in (trial(Wrong(fault="scales"), kind, a, b, torch.bfloat16, CPU) or "")


def test_what_the_trial_finds_wrong_the_reference_computes_and_a_warning_says_so_once() -> None:
    tried = Tried(name="torch", hardware=Wrong(fault="raises"))
    a, b = quantise(draw(1, 5, 40), TENSOR), quantise(draw(2, 7, 40), GRADIENT)
    said = r"torch does not compute products of e4m3 and e5m2 to torch.bfloat16: it says: CUBLAS_STATUS_NOT_SUPPORTED"
    with pytest.warns(RuntimeWarning, match=re.escape(said)) as caught:
        first = tried.product(a, b, torch.bfloat16)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = tried.product(a, b, torch.bfloat16)
        in_float64 = tried.product(a, b, torch.float64)
    truth = Reference().product(a, b, torch.bfloat16)
    assert torch.equal(first, truth) and torch.equal(again, truth)
    assert torch.equal(in_float64, Reference().product(a, b, torch.float64))
    with pytest.warns(RuntimeWarning, match=r"to torch\.float32"):
        tried.product(a, b, torch.float32)


def test_a_machine_of_none_of_a_recipes_formats_refuses_it_by_name_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ZOO_PRODUCTS", "torch")
    monkeypatch.setattr(choose, "machine_of", lambda device: HOPPER)
    said = (
        "precision.recipe=mxfp8: has no product that torch has on H200: it needs compute capability 10.0 or newer, and H200 has 9.0. "
        "Works: fp8_delayed or fp8_current or fp8_blockwise or none; or ZOO_PRODUCTS=reference, which computes it exactly and slowly"
    )
    with pytest.raises(ConfigError, match=re.escape(said)):
        products_for(MXFP8, CPU, torch.bfloat16)
    with pytest.raises(ConfigError, match=r"precision\.recipe=nvfp4: .* capability 10\.0"):
        products_for(NVFP4, CPU, torch.bfloat16)
    monkeypatch.setenv("ZOO_PRODUCTS", "reference")
    assert isinstance(products_for(MXFP8, CPU, torch.bfloat16), Reference)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("machine", [HOPPER, BLACKWELL])
def test_every_recipe_of_a_machine_passes_its_trials_there(
    monkeypatch: pytest.MonkeyPatch, name: str, machine: Machine
) -> None:
    """By products as torch's documents have them; on a GPU tests/gpu/test_products.py asks the machine itself."""
    recipe = RECIPES[name]  # type: ignore[index]
    monkeypatch.setenv("ZOO_PRODUCTS", "torch")
    monkeypatch.setattr(choose, "machine_of", lambda device: machine)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", scaled_grouped_mm)
    if machine is HOPPER and name in ("mxfp8", "nvfp4"):
        with pytest.raises(ConfigError):
            products_for(recipe, CPU, torch.bfloat16)
        return
    found = products_for(recipe, CPU, torch.bfloat16)
    assert isinstance(found, Tried) and isinstance(found.hardware, Scaled)
    assert len(found.found) >= 3 and set(found.found.values()) == {None}


def test_a_recipe_of_which_a_machine_lacks_one_product_runs_and_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = Operand(element="e5m2", scaling="tensor")
    recipe = replace(FP8_CURRENT, input_gradient=InputGradient(gradient=wide, weight=wide))
    monkeypatch.setenv("ZOO_PRODUCTS", "torch")
    monkeypatch.setattr(choose, "machine_of", lambda device: HOPPER)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", scaled_grouped_mm)
    with pytest.warns(RuntimeWarning, match="two operands of e5m2") as caught:
        products_for(recipe, CPU, torch.bfloat16)
    assert len(caught) == 2  # of a linear layer's and of experts'


def test_fp8_with_one_scale_runs_by_torch_on_this_very_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_PRODUCTS", "torch")
    found = products_for(FP8_CURRENT, CPU, torch.bfloat16)
    assert isinstance(found, Tried) and set(found.found.values()) == {None}
    with pytest.raises(ConfigError, match="this processor has none"):
        products_for(MXFP8, CPU, torch.bfloat16)


def test_a_back_end_is_chosen_by_the_device_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZOO_PRODUCTS", raising=False)
    assert products_backend(torch.device("cuda")) == "torch"
    assert products_backend(CPU) == "reference"
    assert isinstance(products_for(MXFP8, CPU, torch.bfloat16), Reference)
    assert isinstance(products_for(MXFP8, torch.device("meta"), torch.bfloat16), Reference)
    monkeypatch.setenv("ZOO_PRODUCTS", "reference")
    assert products_backend(torch.device("cuda")) == "reference"


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        (
            "cublas",
            "cpu",
            "ZOO_PRODUCTS=cublas: multiplies nothing. Works: transformer_engine, reference, torch, or unset",
        ),
        ("transformer_engine", "cpu", "does not run on cpu tensors. Works: reference, torch"),
        ("transformer_engine", "cuda", "is not installed here. Works: transformer_engine after `pip install"),
    ],
)
def test_another_back_end_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, device: str, message: str
) -> None:
    monkeypatch.setenv("ZOO_PRODUCTS", name)
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape(message)):
        products_backend(torch.device(device))


def test_a_recipe_names_the_formats_of_each_of_its_products_once() -> None:
    assert [kinds for _, _, kinds in pairs(NVFP4)] == [
        ("product", "of_rows"),
        ("product", "of_rows"),
        ("product", "of_weights"),
    ]
    assert next(pairs(NVFP4))[:2] == (NVFP4_ROWS, NVFP4_WEIGHT)
    high: Recipe = replace(FP8_CURRENT, input_gradient=InputGradient(gradient=None, weight=None))
    assert len(list(pairs(high))) == 2
    square = Operand(element="e4m3", scaling="128x128")
    odd = replace(FP8_CURRENT, input_gradient=InputGradient(gradient=square, weight=square))
    assert [kinds for _, _, kinds in pairs(odd)][1] == ("product",)


def test_this_processor_is_known_as_one() -> None:
    assert machine_of(CPU).kind == "cpu" and machine_of(torch.device("meta")).kind == "other"
