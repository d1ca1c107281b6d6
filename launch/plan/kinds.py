"""Which layers of a model are alike: declared alike, and with the same products left to the run's dtype by its recipe."""

from __future__ import annotations

from dataclasses import dataclass

from core.config.architecture import Layer, ModelConfig
from core.config.products import products, quantised_products
from core.config.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Layers that are alike. high: the names inside them of products that a recipe leaves in the run's dtype."""

    layer: Layer
    high: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """The different layers of a model under a recipe, those of prediction modules too, in order of appearance.

    of: the kind of every layer by its place among `all`. ahead: that of prediction modules' layers, projection: whether the recipe takes
    what joins their halves; patterns that tell one module from another are not told apart.
    """

    all: tuple[Kind, ...]
    of: tuple[int, ...]
    ahead: int | None
    projection: bool

    @property
    def last(self) -> Kind:
        """That of the last layer."""
        return self.all[self.of[-1]]


def kinds_of(model: ModelConfig, recipe: Recipe | None = None) -> Kinds:
    """The layers of a model, sorted out."""
    high = high_products(model, recipe)
    inside: dict[str, list[str]] = {}
    for name in high:
        path = name.split(".attention.")[0].split(".mlp.")[0]
        inside.setdefault(path, []).append(name.removeprefix(f"{path}."))
    numbers: dict[Kind, int] = {}
    of = {}
    for path, layer in model.all_layers():
        kind = Kind(layer=layer, high=tuple(inside.get(path, ())))
        of[path] = numbers.setdefault(kind, len(numbers))
    return Kinds(
        all=tuple(numbers),
        of=tuple(of[f"layers.{i}"] for i in range(len(model.layers))),
        ahead=of["mtp.0.layer"] if model.predict_ahead else None,
        projection=recipe is not None and "mtp.0.projection.weight" not in high,
    )


def high_products(model: ModelConfig, recipe: Recipe | None) -> tuple[str, ...]:
    """The products that a recipe leaves alone, by name; none without a recipe."""
    if recipe is None or not (recipe.high or recipe.high_first or recipe.high_last):
        return ()
    taken = {product.name for product in quantised_products(recipe, model)}
    return tuple(product.name for product in products(model) if product.name not in taken)
