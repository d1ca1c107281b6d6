"""The all-gather dispatcher: each of the etp * ep ranks that together hold every expert sees all their tokens, and computes what
its own experts, or its share of them, make of those."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from core.kernels.permute import RowMap, map_rows, unpermute
from core.moe.dispatch.expand import expand
from core.moe.dispatch.protocol import ExpertRows, Rows, experts_per_rank
from core.moe.router import Routing
from core.parallel.collectives import Packing, all_gather_rows, reduce_scatter_rows
from core.parallel.groups import Groups


@dataclass(frozen=True, kw_only=True)
class AllGatherPlan:
    """Tokens of every rank of the group, the experts that all of them chose, and the map of my experts' rows."""

    tokens: list[int]
    experts_TK: Tensor
    mine: RowMap | None = None


class AllGatherDispatcher:
    """Moves every token to every rank: little latency for few tokens or a small group, bytes that grow with the group.

    multiple: rows of zeros fill what each of my experts gets up to a multiple of it. packing: how tokens travel there.
    """

    def __init__(self, experts: int, groups: Groups, multiple: int = 1, packing: Packing | None = None) -> None:
        self.local_experts = experts_per_rank(experts, groups.ep)
        self.first_expert = groups.ep.position * self.local_experts
        self.group = groups.experts
        self.multiple, self.packing = multiple, packing

    def dispatch_preprocess(self, hidden_TH: Tensor, routing: Routing) -> tuple[Rows, AllGatherPlan]:
        """Two small all-gathers: how many tokens each rank has, and which experts they chose."""
        count = torch.tensor([hidden_TH.shape[0]], device=routing.experts_TK.device)
        tokens = all_gather_rows(count, [1] * self.group.size, self.group).tolist()
        experts = all_gather_rows(routing.experts_TK.to(torch.int32), tokens, self.group).to(torch.int64)
        return Rows(hidden=hidden_TH, weights=routing.weights_TK), AllGatherPlan(tokens=tokens, experts_TK=experts)

    def dispatch(self, rows: Rows, plan: AllGatherPlan) -> Rows:
        """Two all-gathers: tokens, and router weights."""
        return Rows(
            hidden=all_gather_rows(rows.hidden, plan.tokens, self.group, self.packing),
            weights=all_gather_rows(rows.weights, plan.tokens, self.group),
        )

    def dispatch_postprocess(self, rows: Rows, plan: AllGatherPlan) -> tuple[ExpertRows, AllGatherPlan]:
        """Keep the rows of my own experts, sorted."""
        experts = plan.experts_TK
        first = self.first_expert
        local = torch.where((experts >= first) & (experts < first + self.local_experts), experts - first, -1)
        mine = map_rows(local, self.local_experts, multiple=self.multiple)
        return expand(rows, mine), replace(plan, mine=mine)

    def combine_preprocess(self, rows_RH: Tensor, plan: AllGatherPlan) -> Tensor:
        """Sum each token's rows of my experts: [all tokens of the group, H]."""
        assert plan.mine is not None, "dispatch_postprocess comes first"
        return unpermute(rows_RH, plan.mine)

    def combine(self, rows_RH: Tensor, plan: AllGatherPlan) -> Tensor:
        """One reduce-scatter: every rank gets the sums of its own tokens."""
        return reduce_scatter_rows(rows_RH, plan.tokens, self.group)

    def combine_postprocess(self, rows_RH: Tensor, plan: AllGatherPlan) -> Tensor:
        """Nothing is left to do."""
        return rows_RH
