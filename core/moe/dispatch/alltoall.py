"""The all-to-all dispatcher: every row travels to the rank of its expert and back, once per choice."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from core.kernels.permute import RowMap, map_rows, permute, permute_weights, unpermute
from core.moe.dispatch.protocol import ExpertRows, Rows
from core.moe.router import Routing
from core.parallel.collectives import all_to_all
from core.parallel.groups import Group


@dataclass(frozen=True, kw_only=True)
class AllToAllPlan:
    """Rows sent to and received from each peer, the map of my tokens' rows, and rows received per (peer, local expert)."""

    mine: RowMap
    send_rows: list[int]
    receive_rows: list[int]
    received: list[list[int]]
    by_expert: RowMap | None = None


class AllToAllDispatcher:
    """Experts lie in order over `group`: rank p holds experts p * e … (p + 1) * e - 1."""

    def __init__(self, experts: int, group: Group) -> None:
        if experts % group.size:
            raise ValueError(f"{experts} experts do not divide over {group.size} ranks")
        self.experts = experts
        self.group = group

    def dispatch_preprocess(self, hidden_TH: Tensor, routing: Routing) -> tuple[Rows, AllToAllPlan]:
        """Sort my rows by expert; one all-to-all of 8 * E bytes tells every rank what it will receive."""
        mine = map_rows(routing.experts_TK, self.experts)
        rows = permute(hidden_TH, mine)
        weights = permute_weights(routing.weights_TK, mine)
        peers = self.group.size
        even = [self.experts // peers] * peers
        received = all_to_all(mine.counts_E, even, even, self.group).view(peers, -1).tolist()
        plan = AllToAllPlan(
            mine=mine,
            send_rows=mine.counts_E.view(peers, -1).sum(1).tolist(),
            receive_rows=[sum(counts) for counts in received],
            received=received,
        )
        return Rows(hidden=rows, weights=weights), plan

    def dispatch(self, rows: Rows, plan: AllToAllPlan) -> Rows:
        """Two all-to-alls: the rows, and their weights."""
        hidden = all_to_all(rows.hidden, plan.send_rows, plan.receive_rows, self.group)
        weights = all_to_all(rows.weights, plan.send_rows, plan.receive_rows, self.group)
        return Rows(hidden=hidden, weights=weights)

    def dispatch_postprocess(self, rows: Rows, plan: AllToAllPlan) -> tuple[ExpertRows, AllToAllPlan]:
        """From (peer, expert) order, in which rows arrive, to (expert, peer) order."""
        counts = tuple(sum(column) for column in zip(*plan.received, strict=True))
        if self.group.size == 1:
            return ExpertRows(hidden_RH=rows.hidden, weights_R=rows.weights, counts=counts), plan
        by_expert = _pieces_by_expert(plan.received, rows.hidden.device)
        hidden, weights = permute(rows.hidden, by_expert), permute(rows.weights[:, None], by_expert)[:, 0]
        return ExpertRows(hidden_RH=hidden, weights_R=weights, counts=counts), replace(plan, by_expert=by_expert)

    def combine_preprocess(self, rows_RH: Tensor, plan: AllToAllPlan) -> Tensor:
        """Back to (peer, expert) order."""
        return rows_RH if plan.by_expert is None else unpermute(rows_RH, plan.by_expert)

    def combine(self, rows_RH: Tensor, plan: AllToAllPlan) -> Tensor:
        """One all-to-all, the reverse of dispatch."""
        return all_to_all(rows_RH, plan.receive_rows, plan.send_rows, self.group)

    def combine_postprocess(self, rows_RH: Tensor, plan: AllToAllPlan) -> Tensor:
        """Sum over each token's choices, in order of choice."""
        return unpermute(rows_RH, plan.mine)


def _pieces_by_expert(received: list[list[int]], device: torch.device) -> RowMap:
    """The map that reorders pieces from (peer, expert) to (expert, peer), rows inside a piece staying in order."""
    sizes = torch.tensor(received, dtype=torch.int64)
    starts = (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes)
    lengths = sizes.T.flatten()
    # Row numbers run on inside a piece; at each new piece they jump from where it lands to where it lay.
    landed = lengths.cumsum(0) - lengths
    jumps = torch.repeat_interleave(starts.T.flatten() - landed, lengths)
    order = (torch.arange(jumps.numel()) + jumps).to(device)
    row = torch.empty_like(order)
    row[order] = torch.arange(order.numel(), device=device)
    return RowMap(order_R=order, row_TK=row[:, None], counts_E=sizes.sum(0).to(device))
