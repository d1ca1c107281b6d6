"""What a microbatch is to a model, and what it carries through the layers beside its hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from core.attention.packing import Packing
from core.attention.rope import Rotation
from core.moe.balance import BalanceScope, Load
from core.parallel.groups import Group


class Prescription(Protocol):
    """Experts that tokens of a microbatch have to go to, instead of those that the routers would choose."""

    def of(self, layer: str, mine_T: Tensor) -> Tensor | None:
        """[T, K] int64 for the tokens `mine_T` (int64, places in the microbatch) in a layer (canonical name), -1 for none.

        None where the layer chooses itself. A pure function: it is asked again where a layer is computed again.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class BatchPosition:
    """What the random numbers of a microbatch hang on: seed and step of the run, and the place of its first token in the global batch."""

    seed: int
    step: int
    first: int


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """A whole microbatch, the same on all tp * cp * pp ranks that share it; `packing` says which of its tokens this rank holds.

    tokens, labels: [T] int64, label -100 where nothing is predicted. valid: [T] bool, False for padding; None without any.
    position: needed where training draws random numbers, or where routing is written down. prescribed: None where routers choose.
    """

    tokens: Tensor
    labels: Tensor
    packing: Packing
    valid: Tensor | None = None
    position: BatchPosition | None = None
    prescribed: Prescription | None = None


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
    """What the balance losses of all layers need in training: totals, and loads of earlier microbatches by layer name.

    sequence: the ranks that share a microbatch; tokens: those that share the global batch.
    """

    totals: Totals
    seen: Mapping[str, Load]
    sequence: Group
    tokens: Group

    def scope(self, layer: str, packing: Packing, valid_T: Tensor | None) -> BalanceScope:
        """The scope of one layer."""
        return BalanceScope(
            sequence_T=packing.sequence_T[packing.mine],
            sequences=len(packing.lengths),
            valid_T=valid_T,
            global_tokens=self.totals.tokens,
            seen=self.seen.get(layer),
            sequence=self.sequence,
            tokens=self.tokens,
        )


@dataclass(frozen=True, kw_only=True)
class Context:
    """Packing, which of my tokens are not padding (None: all), rotation angles by the number of dimensions that they turn, in
    training what balance losses are measured against, position and prescribed experts of the microbatch."""

    packing: Packing
    valid_T: Tensor | None
    turns: Mapping[int, Rotation]
    balance: BalanceInputs | None
    position: BatchPosition | None = None
    prescribed: Prescription | None = None
