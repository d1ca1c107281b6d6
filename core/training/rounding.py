"""What a recipe's rounding loses in a step, by layer and kind of operand, over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from core.config.products import quantised_products
from core.config.run import RunConfig
from core.parallel.collectives import all_reduce_max, all_reduce_sum
from core.parallel.groups import Groups
from core.precision.formats import Quantised
from core.precision.grouped import Grouped
from core.precision.history import ROLES, Role
from core.precision.insight import SMALLEST_EXPONENT, Watch
from core.training.insight import PrecisionInsight, precision_insight
from core.transformer.quantise import quantisers
from core.transformer.stage import Stage


class RoundingWatch:
    """A watch for each kind of operand of every layer of the whole model that a recipe takes, those of other ranks' parts too."""

    def __init__(self, layers: tuple[str, ...], device: torch.device) -> None:
        self.watches = {(layer, role): Watch(device) for layer in layers for role in ROLES}

    def add(self, name: str, role: Role, x: Tensor, quantised: Quantised | Grouped) -> None:
        """Add an operand of the products of the weight `name`."""
        self.watches[layer_of(name), role].add(x, quantised)

    def insight(self, groups: Groups) -> dict[str, dict[str, PrecisionInsight]]:
        """By layer and kind of operand; none for a kind that no rank has quantised. Two all-reduces over the world, which the host waits for.

        Every rank calls it at the same place.
        """
        watches = list(self.watches.values())
        sums = all_reduce_sum(torch.stack([watch.sums for watch in watches]), groups.world).tolist()
        largest = all_reduce_max(torch.stack([watch.largest for watch in watches]), groups.world).tolist()
        found: dict[str, dict[str, PrecisionInsight]] = {}
        for (layer, role), row, amax in zip(self.watches, sums, largest, strict=True):
            if row[0]:
                found.setdefault(layer, {})[role] = precision_insight(row, amax, SMALLEST_EXPONENT)
        return found


@contextmanager
def watching(model: Stage, run: RunConfig, step: int) -> Iterator[RoundingWatch | None]:
    """Watches what is quantised inside the block, where `step`, counted from one, is one to measure; None elsewhere.

    Every `precision.insight_interval` steps, and in the last one; never where that is 0 or nothing is quantised.
    """
    recipe, interval = run.precision.recipe, run.precision.insight_interval
    due = interval > 0 and (step % interval == 0 or step == run.train.steps)
    products = quantised_products(recipe, run.model) if recipe is not None and due else ()
    if not products:
        yield None
        return
    watch = RoundingWatch(tuple(dict.fromkeys(layer_of(product.name) for product in products)), model.place.device)
    watched = tuple(quantisers(model))
    for quantiser in watched:
        quantiser.watch = partial(watch.add, quantiser.name)
    try:
        yield watch
    finally:
        for quantiser in watched:
            quantiser.watch = None


def layer_of(name: str) -> str:
    """The layer, or prediction module, of a canonical name: layers.3, mtp.0."""
    return ".".join(name.split(".")[:2])
