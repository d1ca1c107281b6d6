"""Recipes as words and as JSON, both ways; a fifth of one's own in ten lines of a file; and the page that describes them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config.precision import PrecisionConfig
from core.config.recipe import (
    BITS,
    MXFP8,
    NVFP4,
    RECIPES,
    Forward,
    InputGradient,
    Operand,
    Recipe,
    RecipeName,
    WeightGradient,
)
from core.config.recipe_text import (
    names_text,
    operand_text,
    parse_names,
    parse_operand,
    parse_recipe,
    recipe_text,
)
from core.config.router_text import TextError
from core.config.serial import from_json, to_json
from core.errors import RequestError
from tests.core.config.test_override import RUN, changed, faults_of

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"
OPERANDS = st.builds(
    Operand,
    element=st.sampled_from(("e4m3", "e5m2", "e2m1")),
    scaling=st.sampled_from(("tensor", "delayed", "1x128", "128x128", "mx", "nv", "nv16x16")),
    stochastic=st.booleans(),
    hadamard=st.booleans(),
    power_of_two=st.booleans(),
)
MAYBE = st.none() | OPERANDS
NAMES = st.text("abcxyz019.*_", min_size=1, max_size=9).filter(lambda name: name.lower() != "none")
RECIPE_VALUES = st.builds(
    Recipe,
    name=NAMES,
    forward=st.builds(Forward, input=MAYBE, weight=MAYBE),
    input_gradient=st.builds(InputGradient, gradient=MAYBE, weight=MAYBE),
    weight_gradient=st.builds(WeightGradient, gradient=MAYBE, input=MAYBE),
    high=st.lists(NAMES, max_size=3).map(tuple),
    high_first=st.integers(0, 5),
    align=st.sampled_from((16, 32, 128)),
    dispatch=st.booleans(),
)


@given(MAYBE)
def test_an_operand_is_its_text_and_its_json_both_ways(operand: Operand | None) -> None:
    assert parse_operand(operand_text(operand)) == operand
    assert from_json(Operand | None, to_json(operand)) == operand


@given(st.lists(NAMES, max_size=4).map(tuple))
def test_patterns_of_names_are_their_text_both_ways(names: tuple[str, ...]) -> None:
    assert parse_names(names_text(names)) == names


@given(RECIPE_VALUES)
def test_a_run_json_keeps_every_recipe_whole(recipe: Recipe) -> None:
    """Of its own values, not of its name: a file that was read once is not needed again."""
    written = to_json(replace(RUN, precision=PrecisionConfig(recipe=recipe)))
    assert from_json(type(RUN), written).precision.recipe == recipe


@pytest.mark.parametrize("name", RECIPES)
def test_a_shipped_recipe_is_its_name(name: RecipeName) -> None:
    assert parse_recipe(name) == RECIPES[name]
    assert recipe_text(RECIPES[name]) == name == RECIPES[name].name
    assert parse_recipe("none") is None and recipe_text(None) == "none"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mxfp9", "did you mean mxfp8"),
        ("fp16", "is not one of the choices"),
        ("nowhere.py:MINE", "there is no such file"),
    ],
)
def test_what_is_no_recipe_is_said(text: str, said: str) -> None:
    with pytest.raises(TextError, match=said):
        parse_recipe(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("e4m3", "what shares a scale"),
        ("e3m4/mx", "must be an element"),
        ("e4m3/2x2", "what shares a scale"),
        ("e4m3/mx+random", "not with \\+random"),
        ("e4m3/mx+", "not with \\+"),
    ],
)
def test_what_is_no_operand_is_said(text: str, said: str) -> None:
    with pytest.raises(TextError, match=said):
        parse_operand(text)


def test_a_file_has_to_have_the_recipe_that_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("MINE = 'mxfp8'\n")
    for name in ("MINE", "OTHER"):
        with pytest.raises(TextError, match=f"names {name} of .*mine.py, which is no Recipe"):
            parse_recipe(f"{file}:{name}")


def test_single_operands_are_set_and_the_rest_stays() -> None:
    new = changed(
        "precision.recipe=mxfp8",
        "precision.recipe.input_gradient.gradient=e5m2/mx+stochastic",
        "precision.recipe.high=layers.0.*,*.down",
        "precision.recipe.high_last=1",
        "precision.recipe.dispatch=true",
    ).precision.recipe
    gradient = Operand(element="e5m2", scaling="mx", stochastic=True)
    assert new == replace(
        MXFP8,
        input_gradient=replace(MXFP8.input_gradient, gradient=gradient),
        high=("layers.0.*", "*.down"),
        high_last=1,
        dispatch=True,
    )


def test_operands_of_no_recipe_cannot_be_set() -> None:
    assert any("precision.recipe" in said for said in faults_of("precision.recipe.forward.input=e4m3/mx"))


def test_a_json_that_is_no_recipe_is_refused_with_its_place() -> None:
    written = json.loads(json.dumps(to_json(MXFP8)))
    written["forward"]["input"]["scaling"] = "mxx"
    with pytest.raises(RequestError, match=r"recipe\.forward\.input\.scaling"):
        from_json(Recipe, written, "recipe")


# ------------------------------------------------------------------------------------------------------------- the page


def test_the_page_has_the_operands_of_the_shipped_recipes() -> None:
    rows = {line.split("|")[1].strip(" `"): line for line in PAGE.read_text().splitlines() if line.startswith("| `")}
    assert rows.keys() == RECIPES.keys()
    for name, recipe in RECIPES.items():
        cells = re.findall(r"`([^`]+)`", rows[name])[1:]
        assert cells == [operand_text(operand) for _, operand in recipe.operands()]
        assert rows[name].split("|")[-2].strip() == str(recipe.align)


def test_the_recipe_of_the_page_is_ten_lines_and_can_be_chosen(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[0]
    assert len([line for line in code.splitlines() if line.strip() and not line.startswith("from")]) <= 10
    file = tmp_path / "mine.py"
    file.write_text(code)
    recipe = parse_recipe(f"{file}:MINE")
    assert recipe is not None and recipe.name == "mine" and recipe not in RECIPES.values()
    assert changed(f"precision.recipe={file}:MINE").precision.recipe == recipe
    written = to_json(replace(RUN, precision=PrecisionConfig(recipe=recipe)))
    file.unlink()
    assert from_json(type(RUN), written).precision.recipe == recipe


def test_bits_and_scalings_are_those_of_the_operands() -> None:
    assert (NVFP4.bits, MXFP8.bits) == (4, 8)
    assert NVFP4.scalings == {"nv", "nv16x16"} and MXFP8.scalings == {"mx"}
    assert {operand.num_bytes for _, operand in MXFP8.operands()} == {1 + 1 / 32}
    assert {name for name, recipe in RECIPES.items() if recipe.delayed} == {"fp8_delayed"}
    assert all(BITS[operand.element] == 4 for _, operand in NVFP4.operands())
