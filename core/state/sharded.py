"""One rank's piece of a canonical tensor, with its data."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from core.state.box import Box


@dataclass(frozen=True, kw_only=True)
class ShardedTensor:
    """`data` is the piece `box` of the tensor `name` of `shape`; `copies` ranks hold the same piece and this is copy `copy`.

    Names are canonical: `model.layers.0.mlp.experts.gate_up`, `optimizer.exp_avg.layers.0.mlp.experts.gate_up`, …
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    data: Tensor
    copy: int = 0
    copies: int = 1

    def __post_init__(self) -> None:
        if tuple(self.data.shape) != self.box.shape:
            raise ValueError(f"{self.name}: data of shape {tuple(self.data.shape)} for a box of shape {self.box.shape}")
