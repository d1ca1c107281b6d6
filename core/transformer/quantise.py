"""Gives the products of a model the recipe that they are declared to have."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from core.config.architecture import ModelConfig
from core.config.products import quantised_products
from core.config.recipe import Recipe
from core.layers.linear import Linear
from core.layers.mlp import MLP
from core.layers.place import Place
from core.moe.experts import Experts
from core.moe.layer import MoELayer
from core.precision.backends.choose import products_for
from core.precision.hadamard import hadamard_signs
from core.precision.history import AmaxHistory
from core.precision.operands import format_of
from core.precision.parcel import parcels_of
from core.precision.quantiser import Quantiser
from core.precision.reach import reach_of
from core.precision.self_check import self_check
from core.state.spec import TensorSpec

_OWNERS = (Linear, MLP, Experts)
_WEIGHTS = ("weight", "gate_up", "down")


def quantise_model(model: nn.Module, config: ModelConfig, recipe: Recipe, place: Place, seed: int) -> None:
    """Run the products that `recipe` takes by it, those of this rank's parts of `model`; nothing else changes.

    seed: of the run, for stochastic rounding and rotations. Histories of delayed scaling become buffers of the model. Raises ConfigError
    where the device has none of the recipe's formats, ZooError where it rounds to one otherwise than defined.
    """
    try_formats(recipe, place.device)
    taken = {product.name for product in quantised_products(recipe, config)}
    signs = hadamard_signs(seed, "recipe").to(place.device)
    backend = products_for(recipe, place.device, place.dtype)
    for path, module in tuple(model.named_modules()):
        if isinstance(module, MoELayer) and any(name.startswith(f"{path}.experts.") for name in taken):
            module.align(recipe.align, parcels_of(recipe))
        if not isinstance(module, _OWNERS):
            continue
        for name, _ in tuple(module.named_parameters(recurse=False)):
            full = f"{path}.{name}"
            if name not in _WEIGHTS or full not in taken:
                continue
            history = _history(module, recipe, place) if recipe.delayed else None
            if history is not None:
                module.add_module(f"{name}_amax", history)
            module.quantisers[name] = Quantiser(
                name=full,
                recipe=recipe,
                seed=seed,
                signs=signs,
                backend=backend,
                history=history,
                reach=reach_of(_spec(module, name), place.groups, routed=isinstance(module, Experts)),
            )


def try_formats(recipe: Recipe, device: torch.device) -> None:
    """The trial of every format of a recipe on a GPU, each once. A CPU computes the definition, and a plan computes nothing.

    The host waits for the device. Raises ZooError as `self_check` does.
    """
    if device.type != "cuda":
        return
    for format in dict.fromkeys(format_of(operand) for _, operand in recipe.operands()):
        self_check(format, device)


def quantisers(model: nn.Module) -> Iterator[Quantiser]:
    """Those of all weights of a model that have one, in module order."""
    for module in model.modules():
        if isinstance(module, _OWNERS):
            yield from module.quantisers.values()


def histories(model: nn.Module) -> Iterator[AmaxHistory]:
    """Those of all weights under delayed scaling, in module order."""
    yield from (module for module in model.modules() if isinstance(module, AmaxHistory))


def _spec(module: Linear | MLP | Experts, name: str) -> TensorSpec:
    return module.declared if isinstance(module, Linear) else module.declared[name]


def _history(module: Linear | MLP | Experts, recipe: Recipe, place: Place) -> AmaxHistory:
    if not isinstance(module, Experts):
        return AmaxHistory(recipe.history, place.groups, place.device)
    spec = module.declared["gate_up"]
    return AmaxHistory(recipe.history, place.groups, place.device, experts=spec.shape[0], held=spec.box)
