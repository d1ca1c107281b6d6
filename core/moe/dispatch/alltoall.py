"""The all-to-all dispatcher: every row travels to the rank of its expert and back, once per choice.

Where etp cuts the experts, the ranks that hold the parts of one expert have each received other rows: they gather each other's, and
sum the parts of their outputs on the way back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from core.kernels.permute import RowMap, map_rows, permute_with_weights, unpermute
from core.moe.dispatch.protocol import ExpertRows, Rows, experts_per_rank
from core.moe.router import Routing
from core.parallel.collectives import (
    Packing,
    all_gather,
    all_gather_rows,
    all_to_all,
    all_to_all_equal,
    reduce_scatter_rows,
    start_all_to_all,
)
from core.parallel.groups import Groups


@dataclass(frozen=True, kw_only=True)
class AllToAllPlan:
    """Rows sent to and received from each peer of ep, the map of my tokens' rows, and what arrives in the end.

    arrived: rows per (peer of etp, peer of ep, local expert), the order in which they lie. parts: of those, how many each peer
    of etp brings. static: the rows of every piece, where all have equally many.
    """

    mine: RowMap
    send_rows: list[int]
    receive_rows: list[int]
    arrived: list[list[int]]
    parts: list[int]
    static: int | None = None
    by_expert: RowMap | None = None


class AllToAllDispatcher:
    """Experts lie in order over ep: rank p holds experts p * e … (p + 1) * e - 1.

    multiple: rows of zeros fill what a rank sends to an expert up to a multiple of it, so that what arrives is one too.
    packing: how rows travel to the experts; their weights, and gradients, travel as they are.
    """

    def __init__(self, experts: int, groups: Groups, multiple: int = 1, packing: Packing | None = None) -> None:
        self.experts, self.local_experts = experts, experts_per_rank(experts, groups.ep)
        self.ep = groups.ep
        self.etp = groups.etp
        self.multiple, self.packing = multiple, packing

    def dispatch_preprocess(self, hidden_TH: Tensor, routing: Routing) -> tuple[Rows, AllToAllPlan]:
        """Sort my rows by expert; one all-to-all of 8 * E bytes tells every rank what it will receive.

        With static rows all of that is known: nothing is communicated, and the host waits for nothing.
        """
        plan = self._counted(routing) if routing.static_rows is None else self._static(routing, routing.static_rows)
        hidden, weights = permute_with_weights(hidden_TH, routing.weights_TK, plan.mine)
        return Rows(hidden=hidden, weights=weights), plan

    def _counted(self, routing: Routing) -> AllToAllPlan:
        mine = map_rows(routing.experts_TK, self.experts, multiple=self.multiple)
        peers, even = self.ep.size, self.local_experts
        received = all_to_all_equal(mine.counts_E, self.ep)
        arrived = all_gather(received, self.etp).view(self.etp.size, peers, even).tolist()
        return AllToAllPlan(
            mine=mine,
            send_rows=mine.counts_E.view(peers, -1).sum(1).tolist(),
            receive_rows=[sum(counts) for counts in arrived[self.etp.position]],
            arrived=[counts for of_peer in arrived for counts in of_peer],
            parts=[sum(map(sum, of_peer)) for of_peer in arrived],
        )

    def _static(self, routing: Routing, rows: int) -> AllToAllPlan:
        """Every expert gets equally many rows from every rank."""
        rows = -(-rows // self.multiple) * self.multiple
        peers, even = self.ep.size, self.local_experts
        return AllToAllPlan(
            mine=map_rows(routing.experts_TK, self.experts, rows_per_expert=rows),
            send_rows=[even * rows] * peers,
            receive_rows=[even * rows] * peers,
            arrived=[[rows] * even] * (self.etp.size * peers),
            parts=[peers * even * rows] * self.etp.size,
            static=rows,
        )

    def dispatch(self, rows: Rows, plan: AllToAllPlan) -> Rows:
        """Two all-to-alls over ep, of the rows and of their weights, which are only begun; under etp as many all-gathers behind them."""
        hidden, weights = (
            start_all_to_all(x, plan.send_rows, plan.receive_rows, self.ep, packing)
            for x, packing in ((rows.hidden, self.packing), (rows.weights, None))
        )
        if self.etp.size == 1:
            return Rows(hidden=hidden.rows, weights=weights.rows, coming=(hidden, weights))
        return Rows(
            hidden=all_gather_rows(hidden.finish(), plan.parts, self.etp, self.packing),
            weights=all_gather_rows(weights.finish(), plan.parts, self.etp),
        )

    def dispatch_postprocess(self, rows: Rows, plan: AllToAllPlan) -> tuple[ExpertRows, AllToAllPlan]:
        """From (peer, expert) order, in which rows arrive, to (expert, peer) order, peers in the order of the ranks."""
        rows = rows.arrived()
        counts = tuple(sum(column) for column in zip(*plan.arrived, strict=True))
        if len(plan.arrived) == 1:
            return ExpertRows(hidden_RH=rows.hidden, weights_R=rows.weights, counts=counts), plan
        device, etp = rows.hidden.device, self.etp.size
        if plan.static is None:
            by_expert = _pieces_by_expert(plan.arrived, etp, device)
        else:
            by_expert = _equal_pieces((etp, self.ep.size, len(counts), plan.static), device)
        hidden, weights = permute_with_weights(rows.hidden, rows.weights[:, None], by_expert)
        return ExpertRows(hidden_RH=hidden, weights_R=weights, counts=counts), replace(plan, by_expert=by_expert)

    def combine_preprocess(self, rows_RH: Tensor, plan: AllToAllPlan) -> Tensor:
        """Back to (peer, expert) order."""
        return rows_RH if plan.by_expert is None else unpermute(rows_RH, plan.by_expert)

    def combine(self, rows_RH: Tensor, plan: AllToAllPlan) -> Tensor:
        """The reverse of dispatch: a reduce-scatter over etp sums the parts, one all-to-all brings the rows home."""
        whole = reduce_scatter_rows(rows_RH, plan.parts, self.etp)
        return all_to_all(whole, plan.receive_rows, plan.send_rows, self.ep)

    def combine_postprocess(self, rows_RH: Tensor, plan: AllToAllPlan) -> Tensor:
        """Sum over each token's choices, in order of choice."""
        return unpermute(rows_RH, plan.mine)


def _pieces_by_expert(arrived: list[list[int]], etp: int, device: torch.device) -> RowMap:
    """The map that reorders pieces from (peer, expert) to (expert, peer), rows inside a piece staying in order.

    Peers arrive as (peer of etp, peer of ep) and land as (peer of ep, peer of etp), the order of the ranks: so an expert sees its
    rows, and sums over them, in the order in which the all-gather dispatcher brings them.
    """
    sizes = torch.tensor(arrived, dtype=torch.int64)
    starts = (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes)
    by_rank = torch.arange(len(arrived)).view(etp, -1).T.flatten()
    sizes, starts = sizes[by_rank], starts[by_rank]
    lengths = sizes.T.flatten()
    # Row numbers run on inside a piece; at each new piece they jump from where it lands to where it lay.
    landed = lengths.cumsum(0) - lengths
    jumps = torch.repeat_interleave(starts.T.flatten() - landed, lengths)
    order = (torch.arange(jumps.numel()) + jumps).to(device)
    row = torch.empty_like(order)
    row[order] = torch.arange(order.numel(), device=order.device)
    return RowMap(order_R=order, row_TK=row[:, None], counts_E=sizes.sum(0).to(device), complete=True)


def _equal_pieces(sizes: tuple[int, int, int, int], device: torch.device) -> RowMap:
    """`_pieces_by_expert` of pieces of equally many rows, without the host: sizes are etp, ep, experts, and rows of a piece."""
    etp, ep, experts, rows = sizes
    numbers = torch.arange(etp * ep * experts * rows, device=device)
    order = numbers.view(sizes).permute(2, 1, 0, 3).flatten()
    row = numbers.view(experts, ep, etp, rows).permute(2, 1, 0, 3).reshape(-1, 1)
    counts = torch.full((experts,), etp * ep * rows, device=device)
    return RowMap(order_R=order, row_TK=row, counts_E=counts, complete=True)
