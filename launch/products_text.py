"""Which product of a run is multiplied in what: a table of the kinds of layers' weights under the recipe of the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from core.config.products import products, quantised_products
from core.config.recipe import Operand, Recipe
from core.config.recipe_text import operand_text
from core.config.run import RunConfig

# What a weight belongs to, by how its name goes on behind its layer; the first that fits.
_KINDS = (
    ("attention.", "attention"),
    ("mlp.experts.", "routed experts"),
    ("mlp.shared.", "shared experts"),
    ("mlp.latent_", "latent of experts"),
    ("mlp.", "dense MLP"),
    ("projection.", "joined halves"),
)
_ALWAYS = "embedding, head, attention itself, gates of shared experts"


def product_lines(run: RunConfig) -> tuple[str, ...]:
    """The table, a line for each kind of product and each set of layers that are alike; nothing without a recipe."""
    recipe, dtype = run.precision.recipe, run.precision.compute
    if recipe is None:
        return ()
    head = ("product", "layers", "forward", "input gradient", "weight gradient")
    plain = (dtype,) * 3
    rows = [head]
    for label, layers, taken in _rows(run, recipe):
        rows.append((label, layers, *(_formats(recipe, dtype) if taken else plain)))
    rows += [(_ALWAYS, "all", *plain), ("router", "all", *("its own dtype",) * 3)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return tuple(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _formats(recipe: Recipe, dtype: str) -> tuple[str, str, str]:
    """Both operands of each product."""
    sides = recipe.forward, recipe.input_gradient, recipe.weight_gradient
    forward, of_input, of_weight = (_both(tuple(vars(each).values()), dtype) for each in sides)
    return forward, of_input, of_weight


def _both(operands: Sequence[Operand | None], dtype: str) -> str:
    if any(operand is None for operand in operands):
        return dtype
    return " · ".join(operand_text(operand) for operand in operands)


def _rows(run: RunConfig, recipe: Recipe) -> Iterator[tuple[str, str, bool]]:
    """Kind, layers, and whether the recipe takes them. Where it takes some weights of a kind and leaves others, they are named."""
    taken = {product.name for product in quantised_products(recipe, run.model)}
    every: dict[tuple[str, str], list[str]] = {}
    found: dict[tuple[str, bool], dict[str, list[str]]] = {}
    for product in products(run.model):
        place, weight, kind = _placed(product.name)
        every.setdefault((kind, place), []).append(weight)
        found.setdefault((kind, product.name in taken), {}).setdefault(place, []).append(weight)
    order = [kind for _, kind in _KINDS]
    for (kind, low), places in sorted(found.items(), key=lambda item: (order.index(item[0][0]), not item[0][1])):
        alike: dict[str, list[str]] = {}
        for place, weights in places.items():
            label = kind if weights == every[kind, place] else f"{kind}: {', '.join(weights)}"
            alike.setdefault(label, []).append(place)
        for label, where in alike.items():
            yield label, _places(where), low


def _placed(name: str) -> tuple[str, str, str]:
    """Of a canonical name the layer or prediction module, the weight's own name, and the kind."""
    first, number, rest = name.split(".", 2)
    rest = rest.removeprefix("layer.")
    start, kind = next((start, kind) for start, kind in _KINDS if rest.startswith(start))
    place = number if first == "layers" else f"prediction module {number}"
    return place, rest.removeprefix(start).removesuffix(".weight"), kind


def _places(places: Sequence[str]) -> str:
    """Numbers of layers as stretches, then whatever is no number."""
    numbers = [int(place) for place in places if place.isdigit()]
    stretches = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    words = [f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in stretches]
    return ", ".join((*words, *(place for place in places if not place.isdigit())))
