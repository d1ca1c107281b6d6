"""The list of a model's products, from its declaration, against the parameters of the real modules; and what a recipe takes of it."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from core.config.architecture import MoE, SharedExperts
from core.config.family import Family, Size, all_families, find_family
from core.config.products import products, quantised_products, unmatched
from core.config.recipe import MXFP8, RECIPES
from core.parallel.groups import one_rank
from core.state.inventory import declared
from core.transformer.quantise import quantisers
from core.transformer.stage import build_model

SIZES = [pytest.param(f, s, id=f"{f.name}-{s.name}") for f in all_families() for s in f.sizes]
# What every recipe leaves in the run's dtype, or in its own (report section 5.1).
HIGH = (
    "embedding.weight",
    "head.weight",
    ".router.weight",
    ".router.bias",
    "norm.weight",
    ".shared_gate.weight",
    "_bias",
)


@pytest.mark.parametrize(("family", "size"), SIZES)
def test_products_are_all_parameters_but_embedding_head_routers_gates_norms_and_biases(
    family: Family, size: Size
) -> None:
    tensors = declared(build_model(size.model, groups=one_rank(), device="meta"))
    expected = {name: entry.spec.shape for name, entry in tensors.items() if not name.endswith(HIGH)}
    found = {product.name: product for product in products(size.model)}
    assert found.keys() == expected.keys() and len(found) == len(list(products(size.model)))
    for name, product in found.items():
        shape = expected[name]
        front = (product.experts,) if product.routed else ()
        # Halves of gate and up are one matrix of outputs.
        assert (*front, product.outputs, product.inputs) == (*front, prod(shape[len(front) : -1]), shape[-1]), name
        assert product.routed == (".experts." in name)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3", "mixtral"])
def test_the_modules_that_run_by_a_recipe_are_the_products_that_it_takes(name: str, recipe: str) -> None:
    """Known fault D8: router, embedding, head and small projections stay high under every recipe, and what a pattern names does."""
    model = find_family(name).size("tiny").model
    chosen = RECIPES[recipe]  # type: ignore[index]
    for made in (chosen, replace(chosen, high=("layers.*.attention.*",), high_first=1)):
        built = build_model(model, groups=one_rank(), recipe=made)
        taken = [quantiser.name for quantiser in quantisers(built)]
        assert sorted(taken) == sorted(product.name for product in quantised_products(made, model))
        assert not any(name.endswith(HIGH) for name in taken)
    assert taken and not any(name.startswith("layers.0.") for name in taken)
    assert not any(name.startswith("layers.") and ".attention." in name for name in taken)


def test_the_gate_of_shared_experts_is_no_product() -> None:
    model = find_family("deepseek_v3").size("tiny").model
    layers = tuple(
        replace(layer, mlp=replace(layer.mlp, shared=SharedExperts(count=1, gated=True)))
        if isinstance(layer.mlp, MoE)
        else layer
        for layer in model.layers
    )
    gated = replace(model, layers=layers)
    names = [product.name for product in products(gated)]
    assert any(name.endswith("shared.gate_up") for name in names) and not any("gate.weight" in name for name in names)
    built = build_model(gated, groups=one_rank(), recipe=MXFP8)
    assert not any("shared_gate" in quantiser.name for quantiser in quantisers(built))


def test_layers_at_either_end_and_patterns_are_left_out() -> None:
    model = find_family("deepseek_v3").size("tiny").model
    whole = [product.name for product in products(model)]
    last = len(model.layers) - 1

    def left(**changes: object) -> set[str]:
        made = replace(MXFP8, **changes)  # type: ignore[arg-type]
        return set(whole) - {product.name for product in quantised_products(made, model)}

    assert left() == set()
    assert left(high_first=1) == {name for name in whole if name.startswith("layers.0.")}
    assert left(high_last=1) == {name for name in whole if name.startswith(f"layers.{last}.")}
    assert left(high=("*.down", "mtp.*")) == {n for n in whole if n.endswith(".down") or n.startswith("mtp.")}


def test_a_pattern_that_matches_nothing_is_told() -> None:
    """Known fault D8; core/check refuses it."""
    model = find_family("mixtral").size("tiny").model
    recipe = replace(MXFP8, high=("layers.0.*", "layers.*.atention.*", "head.weight"))
    assert unmatched(recipe, model) == ("layers.*.atention.*", "head.weight")
