"""Operands that kernels make in one pass, as the products of a recipe get them: the bits of the definition, and of the same products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from core.config.architecture import SWIGLU
from core.config.recipe import RECIPES, RecipeName
from core.kernels.activation import rounded_forward
from core.precision import quantiser as quantiser_module
from core.precision.experts import quantised_expert_mlp
from core.precision.formats import Quantised
from core.precision.grouped import Grouped
from tests.core.kernels.triton_case import kernels
from tests.core.precision.recipe_case import NAMES, draw, quantiser_of

pytest.importorskip("triton", minversion="3.7")

COUNTS = [32, 0, 16, 48]


def same(got: Quantised | Grouped, truth: Quantised | Grouped) -> None:
    assert got.shape == truth.shape and got.format == truth.format
    for mine, right in ((got.data, truth.data), (got.scales, truth.scales)):
        assert torch.equal(mine.cpu().contiguous().view(torch.uint8), right.cpu().contiguous().view(torch.uint8))
    assert torch.equal(got.dequantise().cpu(), truth.dequantise().cpu())


def refuse(*_: Any, **__: Any) -> Tensor:
    raise AssertionError("the rotated tensor was written")


@pytest.mark.parametrize("which", ["gradient", "input"])
def test_rotated_operands_of_the_weight_gradient_have_the_bits_of_the_definition(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """Of tokens, which zeros fill up to whole groups, and of experts; with the noise of stochastic rounding for gradients."""
    recipe = RECIPES["nvfp4"].weight_gradient
    operand, role = (recipe.gradient, "gradient") if which == "gradient" else (recipe.input, "input")
    assert operand is not None and operand.hadamard and operand.stochastic == (which == "gradient")
    x, counts_E = draw(sum(COUNTS), 24).bfloat16(), torch.tensor(COUNTS)
    seen: list[Tensor] = []
    quantiser = quantiser_of("nvfp4")
    with kernels("reference"):
        truth = quantiser.columns(x[:37], operand, role), quantiser.columns_of_experts(x, counts_E, operand, role)
    monkeypatch.setattr(quantiser_module, "hadamard", refuse)
    with kernels("triton"):
        same(quantiser.columns(x[:37].to(device), operand, role), truth[0])
        same(quantiser.columns_of_experts(x.to(device), counts_E.to(device), operand, role), truth[1])
        quantiser.watch = lambda role, x, made: seen.append(x)
        quantiser.columns(x[:37].to(device), operand, role)
        quantiser.columns_of_experts(x.to(device), counts_E.to(device), operand, role)
    assert [tuple(x.shape) for x in seen] == [(24, 48), (24, 96)]


@pytest.mark.parametrize("name", NAMES)
def test_an_activation_that_is_not_written_has_the_bits_of_one_that_is(device: torch.device, name: RecipeName) -> None:
    """Delayed scaling, too, is told the largest sizes: both times it has remembered the same."""
    operand = RECIPES[name].forward.input
    assert operand is not None
    product, weight = draw(sum(COUNTS), 272).bfloat16().to(device), draw(sum(COUNTS)).to(device)
    counts_E = torch.tensor(COUNTS, device=device)
    one, other = (quantiser_of(name, experts=len(COUNTS)) for _ in range(2))
    with kernels("triton"):
        for _ in range(2):
            got = one.rows_of_swiglu(product, weight, counts_E, operand, "input")
            act = rounded_forward(product, SWIGLU, weight)
            with kernels("reference"):
                same(got, other.rows_of_experts(act.cpu(), counts_E.cpu(), operand, "input"))


@pytest.mark.parametrize("name", NAMES)
def test_experts_whose_activation_is_not_written_have_the_same_output(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, name: RecipeName
) -> None:
    counts = [128, 0, 128]
    rows, weight = draw(256, 16).bfloat16().to(device), draw(256).to(device)
    gate_up, down = draw(3, 2, 32, 16).bfloat16().to(device), draw(3, 16, 32, seed=1).bfloat16().to(device)

    def run() -> Tensor:
        quantisers = {"gate_up": quantiser_of(name, experts=3), "down": quantiser_of(name, experts=3)}
        with kernels("triton"):
            return quantised_expert_mlp(rows, weight, gate_up, down, counts, quantisers)

    fused, calls = run(), []
    written = quantiser_module.Quantiser.rows_of_experts

    def rows_of_swiglu(self: Any, product: Tensor, weight_R: Tensor, counts_E: Tensor, *operand: Any) -> Grouped:
        calls.append(1)
        return written(self, rounded_forward(product, SWIGLU, weight_R), counts_E, *operand)

    monkeypatch.setattr(quantiser_module.Quantiser, "rows_of_swiglu", rows_of_swiglu)
    assert torch.equal(fused, run()) and calls == [1] and fused.isfinite().all() and fused.any()
