"""Experts that take only so many rows, and ranks that do: which choices are dropped (report section 7.1; semantics section 6)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from core.attention.packing import Packing
from core.config.architecture import Capacity
from core.kernels.routing import occurrences, within_capacity
from core.parallel.collectives import all_gather, all_gather_rows
from core.parallel.groups import Group, Groups


@torch.no_grad()
def kept_choices(
    experts_TK: Tensor, weights_TK: Tensor, packing: Packing, *, experts: int, capacity: Capacity, sequence: Group
) -> Tensor:
    """Which of my tokens' choices their experts keep, whatever ranks a microbatch lies on: [T, K] bool.

    experts_TK: -1 for padding. All ranks of the microbatch see all its choices and weights (16 bytes a choice, three all-gathers
    over `sequence`), so that they come to one answer: the one that a single rank would give. The host waits for nothing.
    """
    chosen, weights, order = (
        all_gather_rows(x.contiguous(), packing.shares, sequence) for x in (experts_TK, weights_TK, packing.mine_T)
    )
    top_k = experts_TK.shape[1]
    routed = (chosen[:, :1] >= 0).sum().to(torch.float64)
    kept = within_capacity(
        chosen,
        weights,
        order,
        experts=experts,
        capacity=torch.ceil(capacity.factor * top_k * routed / experts),
        by_weight=capacity.drop == "weight",
    )
    first = sum(packing.shares[: sequence.position])
    return kept[first : first + experts_TK.shape[0]]


def static_rows(capacity: Capacity, packing: Packing, *, top_k: int, experts: int, groups: Groups) -> int:
    """How many rows every rank sends to each expert where capacity is padded, the same number on all of them.

    What an expert keeps of a microbatch, its padding tokens counted, may come from a single rank, but not more than that rank has
    tokens. Every microbatch of a global batch has as many tokens. Under tp all ranks know how many of them a rank has; context
    parallelism cuts at other places in every microbatch, and then only the whole is sure.
    """
    kept = math.ceil(capacity.factor * top_k * packing.tokens / experts)
    return min(kept, max(packing.shares) if groups.cp.size == 1 else packing.tokens)


@torch.no_grad()
def within_budget(experts_TK: Tensor, *, experts: int, top_k: int, budget: float, ep: Group) -> Tensor:
    """Which of my tokens' choices the ranks of their experts take: [T, K] bool, the expert-rank budget of HybridEP.

    experts_TK: -1 for a choice that is not routed. A rank takes floor(its own tokens * top_k * budget) rows from the ranks of `ep`,
    dealt out evenly: each of them may send equally many, and what one does not need is left to the others, the lowest ranks first
    where it does not divide. Of its choices a rank sends the first, by token and then by choice. Under etp this holds for each of the
    ep groups whose ranks hold the parts of the same experts.
    One all-gather of 8 * (ep + 1) bytes; the host waits for nothing.
    """
    flat = experts_TK.flatten()
    to = torch.where(flat >= 0, torch.div(flat, experts // ep.size, rounding_mode="floor"), ep.size)
    wanted = occurrences(to, ep.size + 1)
    told = all_gather(torch.cat([wanted[:-1], wanted.new_full((1,), experts_TK.shape[0])])[None], ep)
    rows = torch.floor(told[:, -1].to(torch.float64) * (top_k * budget)).to(torch.int64)
    granted = _deal_out(rows, told[:, :-1])[ep.position]
    order = to.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device) - (wanted.cumsum(0) - wanted)[to[order]]
    room = torch.cat([granted, granted.new_zeros(1)])
    return (place < room[to]).view_as(experts_TK)


def _deal_out(rows_D: Tensor, wanted_SD: Tensor) -> Tensor:
    """How many rows each source may send to each destination that takes rows_D of them: [S, D] int64, at most what it wants.

    Everyone gets up to a level, the highest that does not exceed the rows. If the i smallest wishes are below it they are met in
    full, and the others share the rest: of all i, the right one gives the highest level.
    """
    sources = wanted_SD.shape[0]
    ordered = wanted_SD.sort(0).values
    met = ordered.cumsum(0) - ordered
    sharing = torch.arange(sources, 0, -1, device=wanted_SD.device)[:, None]
    level = torch.div(rows_D - met, sharing, rounding_mode="floor").amax(0)
    given = torch.minimum(wanted_SD, level)
    above = wanted_SD > level
    first = above.cumsum(0) <= rows_D - given.sum(0)
    return given + (above & first)
