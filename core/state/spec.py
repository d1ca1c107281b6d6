"""What a module declares about each tensor it owns: written once, read by initialisation, optimizer, checkpoint and plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from core.state.box import Box

# Over which ranks equal copies of a piece lie: dp * cp for everything outside the experts, edp for the experts.
Replicas = Literal["dense", "expert"]


@dataclass(frozen=True, kw_only=True)
class Normal:
    """Drawn from a normal distribution of mean 0, by (seed, canonical name, global index)."""

    std: float


@dataclass(frozen=True, kw_only=True)
class Constant:
    """Every element equal."""

    value: float


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of the canonical state, and the piece of it that this rank holds (contract 5).

    decay: whether weight decay applies (matrices, not gains). trained: False for a buffer such as the router bias.
    """

    shape: tuple[int, ...]
    box: Box
    replicas: Replicas
    init: Normal | Constant
    decay: bool = True
    trained: bool = True
