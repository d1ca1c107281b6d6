"""A linear layer that knows its place in the canonical state."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from core.layers.place import Place
from core.parallel.groups import Group
from core.precision.linear import Once
from core.precision.quantiser import Quantiser
from core.state.box import Box, part, stretch, whole
from core.state.spec import Normal, TensorSpec

# Which dimension of a weight [out_features, in_features] tp cuts.
Cut = Literal["none", "rows", "columns"]


class Linear(nn.Module):
    """x @ weight.T without a bias; weight [out_features, in_features], whole on every rank of tp or cut.

    Cut by rows, all tokens of the context rank go in and this rank's features come out; cut by columns, features go in and a
    part of the sum comes out. heads: rows form so many heads, which stay whole; where tp has more ranks than heads, neighbours
    hold the same one. Raises ValueError where neither of heads and ranks divides the other.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        init_std: float,
        place: Place,
        cut: Cut = "none",
        heads: int | None = None,
    ) -> None:
        super().__init__()
        shape, tp = (out_features, in_features), place.groups.tp
        box, adjacent = _rows_of_heads(shape, heads, tp) if heads is not None else _cut(shape, cut, tp)
        self.place = place
        self.quantisers: dict[str, Quantiser] = {}
        self.weight = nn.Parameter(place.empty(*box.shape))
        self.declared = TensorSpec(shape=shape, box=box, replicas="dense", init=Normal(std=init_std), adjacent=adjacent)

    def specs(self) -> dict[str, TensorSpec]:
        """The weight's declaration."""
        return {"weight": self.declared}

    def forward(self, x: Tensor, once: Once | None = None) -> Tensor:
        """[T, in_features] to [T, out_features], of a cut weight this rank's share of either. once: see `together`."""
        return self.place.product(x, self.weight, self.quantisers.get("weight"), once)


def together(x: Tensor, *layers: Linear) -> tuple[Tensor, ...]:
    """Each layer's output of the same x, of which a recipe rounds and keeps one copy for all of them."""
    once = Once()
    return tuple(layer(x, once) for layer in layers)


def _cut(shape: tuple[int, ...], cut: Cut, tp: Group) -> tuple[Box, int]:
    """This rank's box, and how many neighbours hold the same."""
    match cut:
        case "none":
            return whole(shape), tp.size
        case "rows":
            return stretch(shape, 0, tp.position, tp.size), 1
        case "columns":
            return stretch(shape, 1, tp.position, tp.size), 1


def _rows_of_heads(shape: tuple[int, ...], heads: int, tp: Group) -> tuple[Box, int]:
    if heads % tp.size and tp.size % heads:
        raise ValueError(f"{heads} heads lie neither evenly on {tp.size} ranks nor each on equally many of them")
    adjacent = max(1, tp.size // heads)
    return part(shape, 0, tp.position // adjacent, tp.size // adjacent), adjacent
