"""Products in low precision on a GPU: every recipe that it has passes its trials there, and products of a layer's sizes stay in bounds."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from core.config.recipe import RECIPES, RecipeName
from core.errors import ConfigError
from core.precision.backends.choose import Hardware, Tried, pairs, products_for, trial
from core.precision.backends.machine import machine_of
from core.precision.backends.scaled import Scaled
from core.precision.formats import quantise
from core.precision.grouped import quantise_grouped, quantise_grouped_columns
from tests.core.numbers import draw

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use (CUDA)")
LOST = 2.0**-10


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of the tensors."""
    return torch.device("cuda", torch.cuda.current_device())


def known(name: RecipeName, device: torch.device) -> Scaled:
    """torch's products; the test ends here where the GPU has none of the recipe's."""
    scaled = Scaled(machine=machine_of(device), align=RECIPES[name].align)
    lacks = [scaled.missing(a, b, torch.bfloat16) for a, b, _ in pairs(RECIPES[name])]
    if None not in lacks:
        pytest.skip(str(lacks[0]))
    return scaled


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_product_of_a_recipe_runs_on_the_matrix_units_and_is_right(
    device: torch.device, name: RecipeName, dtype: torch.dtype
) -> None:
    """Without a warning, which would say that the reference stands in for one."""
    known(name, device)
    found = products_for(RECIPES[name], device, dtype)
    assert isinstance(found, Tried) and set(found.found.values()) == {None}


@pytest.mark.parametrize("name", RECIPES)
def test_experts_one_by_one_are_right_too(device: torch.device, name: RecipeName) -> None:
    scaled = Scaled(machine=known(name, device).machine, align=RECIPES[name].align, grouped=False)
    for a, b, kinds in pairs(RECIPES[name]):
        for kind in kinds:
            assert trial(scaled, kind, a, b, torch.bfloat16, device) is None


def test_a_recipe_that_the_gpu_lacks_is_refused_by_name(device: torch.device) -> None:
    lacking = [
        name
        for name, recipe in RECIPES.items()
        if all(Scaled(machine=machine_of(device), align=1).missing(a, b, torch.bfloat16) for a, b, _ in pairs(recipe))
    ]
    for name in lacking:
        with pytest.raises(ConfigError, match=rf"precision\.recipe={name}: .* capability .*ZOO_PRODUCTS=reference"):
            products_for(RECIPES[name], device, torch.bfloat16)


@pytest.mark.parametrize("name", RECIPES)
def test_products_of_a_layers_sizes_stay_in_their_bounds(device: torch.device, name: RecipeName) -> None:
    """Sums over 7168 numbers, as of DeepSeek-V3, and over a thousand rows of experts, one of which has none."""
    scaled = known(name, device)
    x, weight = draw(1, 1100, 7168).to(device).float(), draw(2, 1000, 7168).to(device).float()
    counts_E = torch.tensor([384, 0, 128, 1024], device=device)
    rows = draw(3, int(counts_E.sum()), 720).to(device).float()
    matrices = draw(4, len(counts_E), 400, 720).to(device).float()
    for a, b, kinds in pairs(RECIPES[name]):
        left, right = quantise(x, a), quantise(weight, b)
        wide = [left.dequantise(torch.float64), right.dequantise(torch.float64)]
        check(scaled.product(left, right, torch.bfloat16), wide[0] @ wide[1].T, wide[0].abs() @ wide[1].abs().T)
        if "of_rows" in kinds:
            grouped, many = quantise_grouped(rows, counts_E, a), quantise(matrices, b)
            got = scaled.of_rows(grouped, many, torch.bfloat16).split(counts_E.tolist())
            pieces = grouped.dequantise(torch.float64).split(counts_E.tolist())
            for y, p, m in zip(got, pieces, many.dequantise(torch.float64), strict=True):
                check(y, p @ m.T, p.abs() @ m.abs().T)
        else:
            one, other = (
                quantise_grouped_columns(rows, counts_E, a),
                quantise_grouped_columns(rows[:, :400], counts_E, b),
            )
            got = scaled.of_weights(one, other, torch.bfloat16).unbind()
            cut = [g.dequantise(torch.float64).split(counts_E.tolist(), 1) for g in (one, other)]
            for y, p, m in zip(got, *cut, strict=True):
                check(y, p @ m.T, p.abs() @ m.abs().T)


def check(got: torch.Tensor, truth: torch.Tensor, sizes: torch.Tensor) -> None:
    """Every element within what is lost of its terms, and one rounding."""
    bound = LOST * sizes + torch.finfo(got.dtype).eps * truth.abs()
    assert bool(((got.double() - truth).abs() <= bound).all())


@pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs transformer-engine")
@pytest.mark.parametrize("name", RECIPES)
def test_transformer_engine_multiplies_our_codes_rightly(device: torch.device, name: RecipeName) -> None:
    from core.precision.backends.transformer_engine import load

    engine: Hardware = load(machine_of(device))
    for a, b, kinds in pairs(RECIPES[name]):
        if engine.missing(a, b, torch.bfloat16) is None:
            assert [trial(engine, kind, a, b, torch.bfloat16, device) for kind in kinds] == [None] * len(kinds)
