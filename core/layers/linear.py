"""A linear layer that knows its place in the canonical state."""

from __future__ import annotations

from torch import Tensor, nn

from core.layers.place import Place
from core.precision.matmul import linear
from core.state.box import whole
from core.state.spec import Normal, TensorSpec


class Linear(nn.Module):
    """x @ weight.T without a bias; weight [out_features, in_features], the same on every rank."""

    def __init__(self, in_features: int, out_features: int, *, init_std: float, place: Place) -> None:
        super().__init__()
        self.weight = nn.Parameter(place.empty(out_features, in_features))
        self.init_std = init_std

    def specs(self) -> dict[str, TensorSpec]:
        """The weight's declaration."""
        shape = tuple(self.weight.shape)
        return {"weight": TensorSpec(shape=shape, box=whole(shape), replicas="dense", init=Normal(std=self.init_std))}

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] to [T, out_features]."""
        return linear(x, self.weight)
