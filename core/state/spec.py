"""What a module declares about each tensor it owns: written once, read by initialisation, optimizer, checkpoint and plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from core.state.box import Box

# Over which ranks equal copies of a piece lie: cp * dp and neighbours of tp for everything outside the experts, edp for the
# experts, and for the embedding also the pipeline ranks that need it.
Replicas = Literal["dense", "expert", "embedding"]


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

    adjacent: of a "dense" tensor, how many neighbours along tp hold the same piece: 1 where tp cuts it, tp where it does not, and
    in between for key and value heads that several ranks share.
    Every copy's gradient is a part, from other tokens or other heads; the gradient is the plain sum over all copies (contract 4).
    decay: whether weight decay applies (matrices, not gains). trained: False for a buffer such as the router bias.
    """

    shape: tuple[int, ...]
    box: Box
    replicas: Replicas
    init: Normal | Constant
    adjacent: int = 1
    decay: bool = True
    trained: bool = True
