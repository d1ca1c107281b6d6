"""The table of which product is multiplied in what."""

from __future__ import annotations

import re
from dataclasses import replace

from core.config.precision import PrecisionConfig
from core.config.recipe import MXFP8, NVFP4, InputGradient, Recipe
from launch.products_text import product_lines
from tests.launch.plan.runs import deepseek_run


def rows(recipe: Recipe | None) -> list[list[str]]:
    run = replace(deepseek_run(), precision=PrecisionConfig(compute="bfloat16", recipe=recipe))
    return [re.split(r" {2,}", line) for line in product_lines(run)]


def test_without_a_recipe_there_is_no_table() -> None:
    assert rows(None) == []


def test_every_kind_of_product_has_a_line_with_its_layers_and_formats() -> None:
    found = rows(MXFP8)
    low, all_layers = ["e4m3/mx · e4m3/mx"] * 3, "0–60, prediction module 0"
    assert found[0] == ["product", "layers", "forward", "input gradient", "weight gradient"]
    assert found[1:] == [
        ["attention", all_layers, *low],
        ["routed experts", "3–60, prediction module 0", *low],
        ["shared experts", "3–60, prediction module 0", *low],
        ["dense MLP", "0–2", *low],
        ["joined halves", "prediction module 0", *low],
        ["embedding, head, attention itself, gates of shared experts", "all", *["bfloat16"] * 3],
        ["router", "all", *["its own dtype"] * 3],
    ]


def test_what_a_recipe_leaves_alone_has_lines_of_its_own() -> None:
    recipe = replace(
        NVFP4,
        input_gradient=InputGradient(gradient=None, weight=None),
        high=("layers.7.attention.query_up.weight",),
        high_first=3,
        high_last=1,
    )
    low = ["e2m1/nv · e2m1/nv16x16", "bfloat16", "e2m1/nv+stochastic+hadamard · e2m1/nv+hadamard"]
    plain = ["bfloat16"] * 3
    assert rows(recipe)[1:7] == [
        ["attention", "3–6, 8–59, prediction module 0", *low],
        ["attention: query_down, latent_down, latent_up, output", "7", *low],
        ["attention", "0–2, 60", *plain],
        ["attention: query_up", "7", *plain],
        ["routed experts", "3–59, prediction module 0", *low],
        ["routed experts", "60", *plain],
    ]
    assert ["dense MLP", "0–2", *plain] in rows(recipe)
