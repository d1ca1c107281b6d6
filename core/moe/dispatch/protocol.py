"""How tokens reach their experts and come back, in six stages (report section 2.1.3).

Stages are apart so that each is either computation or communication, which is what lets one be hidden behind the other:
preprocess, dispatch, postprocess on the way to the experts; the mirror image on the way back. What a later stage needs of an
earlier one travels in a plan that the caller carries, so that a dispatcher holds no state between calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from core.moe.router import Routing
from core.parallel.collectives import UnderWay
from core.parallel.groups import Group

PlanT = TypeVar("PlanT")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows under way: hidden [R, H], and the router weight of each [R] float32. coming: what still fills them, None where they are there."""

    hidden: Tensor
    weights: Tensor
    coming: tuple[UnderWay, UnderWay] | None = None

    def arrived(self) -> Rows:
        """The rows when they are there; called once, by the stage behind the communication."""
        if self.coming is None:
            return self
        hidden, weights = (part.finish() for part in self.coming)
        return Rows(hidden=hidden, weights=weights)


@dataclass(frozen=True, kw_only=True)
class ExpertRows:
    """The rows of this rank's experts, sorted by expert; counts[i] of them for local expert i, on the host."""

    hidden_RH: Tensor
    weights_R: Tensor
    counts: tuple[int, ...]


def experts_per_rank(experts: int, ep: Group) -> int:
    """How many experts each rank of ep holds. Raises ValueError where they do not divide."""
    if experts % ep.size:
        raise ValueError(f"{experts} experts do not divide over {ep.size} ranks")
    return experts // ep.size


class Dispatcher(Protocol[PlanT]):
    """Six stages; every rank of the expert group runs all of them, with any number of tokens including none."""

    def dispatch_preprocess(self, hidden_TH: Tensor, routing: Routing) -> tuple[Rows, PlanT]:
        """Bring the rows into sending order and agree on sizes, for which the host waits unless they are fixed beforehand."""
        ...

    def dispatch(self, rows: Rows, plan: PlanT) -> Rows:
        """Communicate the rows to the ranks of their experts. What is computed between this and the next stage may hide it."""
        ...

    def dispatch_postprocess(self, rows: Rows, plan: PlanT) -> tuple[ExpertRows, PlanT]:
        """Sort what arrived by local expert; the host waits once more where only the arrived rows tell how many each expert has."""
        ...

    def combine_preprocess(self, rows_RH: Tensor, plan: PlanT) -> Tensor:
        """Bring the experts' outputs into returning order."""
        ...

    def combine(self, rows_RH: Tensor, plan: PlanT) -> Tensor:
        """Communicate the outputs back to the ranks of their tokens."""
        ...

    def combine_postprocess(self, rows_RH: Tensor, plan: PlanT) -> Tensor:
        """Sum each token's outputs: [T, H]."""
        ...
