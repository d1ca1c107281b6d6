"""The token-once dispatcher: a token goes once to each rank that holds some of its experts, whatever their number, and one row comes
back from there, the sum of what they made of it (report section 4.2.2; the semantics of DeepEP, arXiv 2412.19437 section 3.2).

With nodes of several ranks a token goes once to each node that needs it, to the rank at the same place there, which hands it on inside
the node; on the way back the node's parts are summed before they leave it. Runs on any backend.

Shape letters: P tokens under way or arrived, K choices each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core.kernels.permute import RowMap, map_rows, permute, unpermute
from core.moe.dispatch.expand import collect, expand, map_arrived
from core.moe.dispatch.protocol import ExpertRows, Rows, experts_per_rank
from core.moe.router import Routing
from core.parallel.collectives import (
    Packing,
    all_gather,
    all_gather_rows,
    all_to_all,
    all_to_all_equal,
    reduce_scatter_rows,
)
from core.parallel.groups import Group, Groups


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One exchange over `group`: which tokens go to which rank, and how many go and come."""

    group: Group
    leaving: RowMap
    send_rows: list[int]
    receive_rows: list[int]

    def out(self, x: Tensor, packing: Packing | None = None) -> Tensor:
        """Rows in sending order to those that have arrived."""
        return all_to_all(x, self.send_rows, self.receive_rows, self.group, packing)

    def back(self, x: Tensor) -> Tensor:
        """The reverse of `out`."""
        return all_to_all(x, self.receive_rows, self.send_rows, self.group)


@dataclass(frozen=True, kw_only=True)
class FlexPlan:
    """The hops in order, the rows that each peer of etp brings after them, and the map of my experts' rows."""

    hops: tuple[Hop, ...]
    parts: list[int]
    arrived: RowMap


class FlexDispatcher:
    """Experts lie in order over ep. multiple: rows of zeros fill what each expert gets up to a multiple of it, at its own rank.
    packing: how tokens travel on every hop to their experts."""

    def __init__(self, experts: int, groups: Groups, multiple: int = 1, packing: Packing | None = None) -> None:
        self.local_experts = experts_per_rank(experts, groups.ep)
        self.ep, self.etp, self.multiple, self.packing = groups.ep, groups.etp, multiple, packing
        # A hop goes to the ranks of a group, each of which stands for so many experts: its own, or those of its node.
        self.route: tuple[tuple[Group, int], ...] = ((groups.ep, self.local_experts),)
        if groups.node.size > 1:
            of_node = self.local_experts * groups.node.size
            self.route = ((groups.nodes, of_node), (groups.node, self.local_experts))

    def dispatch_preprocess(self, hidden_TH: Tensor, routing: Routing) -> tuple[Rows, FlexPlan]:
        """Plan the whole way: each hop tells its ranks how many tokens come, then which experts they chose (4 * (K + 1) bytes each)."""
        chosen = routing.experts_TK.to(torch.int32)
        # Where a token comes from travels with it: experts see their rows in the order of the ranks, whatever way those took.
        source = chosen.new_full((chosen.shape[0], 1), self.ep.position * self.etp.size + self.etp.position)
        told, hops = torch.cat([chosen, source], dim=1), []
        for group, experts in self.route:
            hop, told = _plan_hop(told, experts, group)
            hops.append(hop)
        count = torch.tensor([told.shape[0]], device=told.device)
        parts = all_gather(count, self.etp).tolist()
        told = all_gather_rows(told, parts, self.etp)
        straight = len(self.route) == 1 and self.etp.size == 1
        order = None if straight else told[:, -1].argsort(stable=True)
        arrived = map_arrived(told[:, :-1], self.local_experts, multiple=self.multiple, order_P=order)
        rows = _leave(Rows(hidden=hidden_TH, weights=routing.weights_TK), hops[0])
        return rows, FlexPlan(hops=tuple(hops), parts=parts, arrived=arrived)

    def dispatch(self, rows: Rows, plan: FlexPlan) -> Rows:
        """Two all-to-alls a hop, tokens and the weights [P, K] of their choices, and as many all-gathers over etp."""
        for at, hop in enumerate(plan.hops):
            sent = rows if at == 0 else _leave(rows, hop)
            rows = Rows(hidden=hop.out(sent.hidden, self.packing), weights=hop.out(sent.weights))
        return Rows(
            hidden=all_gather_rows(rows.hidden, plan.parts, self.etp, self.packing),
            weights=all_gather_rows(rows.weights, plan.parts, self.etp),
        )

    def dispatch_postprocess(self, rows: Rows, plan: FlexPlan) -> tuple[ExpertRows, FlexPlan]:
        """A row for each choice of an expert of mine, sorted."""
        return expand(rows, plan.arrived), plan

    def combine_preprocess(self, rows_RH: Tensor, plan: FlexPlan) -> Tensor:
        """The sum of every token's rows at this rank: [P, H]."""
        return collect(rows_RH, plan.arrived)

    def combine(self, rows_PH: Tensor, plan: FlexPlan) -> Tensor:
        """A reduce-scatter over etp, and the hops in reverse: one row a token, summed where the way out had forked."""
        rows_PH = reduce_scatter_rows(rows_PH, plan.parts, self.etp)
        for hop in plan.hops[:0:-1]:
            rows_PH = unpermute(hop.back(rows_PH), hop.leaving)
        return plan.hops[0].back(rows_PH)

    def combine_postprocess(self, rows_PH: Tensor, plan: FlexPlan) -> Tensor:
        """Sum what the ranks, or nodes, made of each token, in their order."""
        return unpermute(rows_PH, plan.hops[0].leaving)


def _leave(rows: Rows, hop: Hop) -> Rows:
    """Tokens and weights [., K] in the sending order of a hop."""
    return Rows(hidden=permute(rows.hidden, hop.leaving), weights=permute(rows.weights, hop.leaving))


def _plan_hop(told: Tensor, experts: int, group: Group) -> tuple[Hop, Tensor]:
    """A hop over `group`, whose ranks stand for `experts` experts each, and what arrives of `told`.

    told: int32 [P, K + 1], chosen experts counted from the first that the group stands for, -1 for none; the last column travels as
    it is. The host waits for the counts.
    """
    chosen = told[:, :-1]
    # Ascending, so that equal ranks are neighbours, of which the first stands for all.
    to = torch.div(chosen, experts, rounding_mode="floor").sort(1).values
    to[:, 1:].masked_fill_(to[:, 1:] == to[:, :-1], -1)
    leaving = map_rows(to.to(torch.int64), group.size)
    received = all_to_all_equal(leaving.counts_E, group)
    send_rows, receive_rows = torch.stack([leaving.counts_E, received]).tolist()
    hop = Hop(group=group, leaving=leaving, send_rows=send_rows, receive_rows=receive_rows)
    rank = to.flatten()[leaving.order_R][:, None]
    leaves = told[leaving.token_R]
    local = leaves[:, :-1] - rank * experts
    local.masked_fill_((local < 0) | (local >= experts), -1)
    return hop, hop.out(torch.cat([local, leaves[:, -1:]], dim=1))
