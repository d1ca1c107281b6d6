"""Recipes and their operands as one word on a command line, and back: NAME or FILE.py:NAME; ELEMENT/SCALING[+MARK…]."""

from __future__ import annotations

import difflib
import runpy
from pathlib import Path
from typing import get_args

from core.config.recipe import RECIPES, ElementName, Operand, Recipe, ScalingName
from core.config.router_text import TextError

RECIPE_EXAMPLE = f"{', '.join(RECIPES)}, FILE.py:NAME, or none"
OPERAND_EXAMPLE = "e4m3/1x128, e4m3/128x128+power_of_two, e2m1/nv+stochastic+hadamard, or none"
_MARKS = ("stochastic", "hadamard", "power_of_two")


def recipe_text(recipe: Recipe | None) -> str:
    """The name of a recipe."""
    return "none" if recipe is None else recipe.name


def parse_recipe(text: str) -> Recipe | None:
    """The recipe of this name, or NAME of a Python file. Raises TextError; what the file itself raises goes on."""
    if text.lower() == "none":
        return None
    found = next((recipe for name, recipe in RECIPES.items() if name == text), None)
    if found is not None:
        return found
    file, sign, name = text.rpartition(":")
    if not sign or not file.endswith(".py"):
        close = difflib.get_close_matches(text, RECIPES, n=1)
        raise TextError("is not one of the choices" + (f" (did you mean {close[0]}?)" if close else ""))
    if not Path(file).is_file():
        raise TextError(f"names {file}, and there is no such file")
    made = runpy.run_path(file).get(name)
    if not isinstance(made, Recipe):
        raise TextError(f"names {name} of {file}, which is no Recipe of core.config.recipe")
    return made


def operand_text(operand: Operand | None) -> str:
    """The text that `parse_operand` turns back into `operand`."""
    if operand is None:
        return "none"
    marks = [mark for mark in _MARKS if vars(operand)[mark]]
    return "+".join((f"{operand.element}/{operand.scaling}", *marks))


def parse_operand(text: str) -> Operand | None:
    """The operand that a text says. Raises TextError."""
    if text.lower() == "none":
        return None
    first, *marks = text.split("+")
    element, _, scaling = first.partition("/")
    known = next((name for name in get_args(ElementName) if name == element), None)
    shared = next((name for name in get_args(ScalingName) if name == scaling), None)
    if known is None or shared is None:
        elements, scalings = ", ".join(get_args(ElementName)), ", ".join(get_args(ScalingName))
        raise TextError(f"must be an element ({elements}), `/`, and what shares a scale ({scalings})")
    odd = [mark for mark in marks if mark not in _MARKS]
    if odd:
        raise TextError(f"may go on with +{', +'.join(_MARKS)}, not with +{odd[0]}")
    return Operand(
        element=known,
        scaling=shared,
        stochastic="stochastic" in marks,
        hadamard="hadamard" in marks,
        power_of_two="power_of_two" in marks,
    )


def names_text(names: tuple[str, ...]) -> str:
    """Patterns of names as one word."""
    return ",".join(names) or "none"


def parse_names(text: str) -> tuple[str, ...]:
    """Patterns of names, separated by commas; none for no pattern."""
    return () if text.lower() == "none" else tuple(name.strip() for name in text.split(",") if name.strip())
