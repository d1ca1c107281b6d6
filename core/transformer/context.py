"""What a microbatch carries beside its tokens, and what comes out of a model beside its hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from core.attention.packing import Packing
from core.attention.rope import Rotation
from core.moe.balance import BalanceScope, Load
from core.moe.router import Routing
from core.parallel.groups import Group


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Counts over the whole global batch, by which sums are divided once (contract 4).

    tokens: that are routed. labels: that the main head predicts. ahead: that each multi-token prediction module predicts.
    """

    tokens: int
    labels: int
    ahead: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BalanceInputs:
    """What the balance losses of all layers need in training: totals, and loads of earlier microbatches by layer name."""

    totals: Totals
    seen: Mapping[str, Load]
    tokens: Group

    def scope(self, layer: str, packing: Packing, valid_T: Tensor | None) -> BalanceScope:
        """The scope of one layer."""
        return BalanceScope(
            lengths=packing.lengths,
            valid_T=valid_T,
            global_tokens=self.totals.tokens,
            seen=self.seen.get(layer),
            tokens=self.tokens,
        )


@dataclass(frozen=True, kw_only=True)
class Context:
    """Packing, padding (valid_T: False), rotation angles by the number of dimensions that they turn, and in training what
    balance losses are measured against."""

    packing: Packing
    valid_T: Tensor | None
    turns: Mapping[int, Rotation]
    balance: BalanceInputs | None


@dataclass(frozen=True, kw_only=True)
class StageOutput:
    """hidden [T, hidden] after the final norm, and the routing of every MoE layer by canonical layer name."""

    hidden: Tensor
    routings: dict[str, Routing]
