"""Choices that look at a whole microbatch: optimal transport, experts that choose their tokens, and the thresholds of quantile balancing.

The tokens of a microbatch lie on several ranks. All of them see its logits and come to one answer, the one that a single rank
would give, so that nothing depends on the mapping. Nothing here has a gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from core.attention.packing import Packing
from core.config.architecture import ExpertChoice, Sinkhorn
from core.kernels.routing import highest
from core.parallel.collectives import all_gather_rows
from core.parallel.groups import Group

# Added to every sum that is divided by.
_TINY = 1e-8


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """rows_NE: of all N tokens of a microbatch that are not padding, in its order. place_T: int64, which of them mine are, -1 for padding."""

    rows_NE: Tensor
    place_T: Tensor

    def mine(self, chosen_NK: Tensor) -> Tensor:
        """My tokens' rows of what was chosen for all, -1 for padding: [T, K]."""
        none = chosen_NK.new_full((1, chosen_NK.shape[1]), -1)
        return torch.cat([chosen_NK, none])[self.place_T]


@torch.no_grad()
def whole_microbatch(rows_TE: Tensor, valid_T: Tensor | None, packing: Packing, sequence: Group) -> Microbatch:
    """The rows of every rank of `sequence`, from my own [T, E].

    Two all-gathers over `sequence`, of the rows and of 8 bytes a token. The host waits for the number of tokens that are no padding.
    """
    order = packing.mine_T if valid_T is None else packing.mine_T.masked_fill(~valid_T, -1)
    rows, order = (all_gather_rows(x.contiguous(), packing.shares, sequence) for x in (rows_TE.detach(), order))
    sorted_order, at = order.sort(stable=True)
    at = at[sorted_order >= 0]
    place = torch.full_like(order, -1)
    place[at] = torch.arange(at.numel(), device=at.device)
    first = sum(packing.shares[: sequence.position])
    return Microbatch(rows_NE=rows[at], place_T=place[first : first + rows_TE.shape[0]])


def chosen_together(
    logits_TE: Tensor,
    selection: Sinkhorn | ExpertChoice,
    top_k: int,
    *,
    valid_T: Tensor | None,
    packing: Packing,
    sequence: Group,
) -> Tensor:
    """The experts of my tokens, int64, -1 for none: [T, top_k], or [T, E] where experts choose.

    Communicates and waits as `whole_microbatch`.
    """
    microbatch = whole_microbatch(logits_TE, valid_T, packing, sequence)
    if isinstance(selection, Sinkhorn):
        scores = sinkhorn(microbatch.rows_NE, selection.tolerance, selection.rounds)
        return microbatch.mine(highest(scores, top_k))
    return microbatch.mine(experts_that_take(torch.softmax(microbatch.rows_NE, dim=-1), top_k))


@torch.no_grad()
def sinkhorn(logits_NE: Tensor, tolerance: float, rounds: int) -> Tensor:
    """Scores [N, E] float64 whose rows add up to 1/N, and whose columns to 1/E as nearly as `tolerance` asks.

    With A = exp(logits), u_t = (1/N) / (sum_e v_e A_te + 1e-8) and v_e = (1/E) / (sum_t u_t A_te + 1e-8) in turn from v = 1, until
    mean |v - v_old| <= tolerance; S = u A v. In float64: where an expert is hardly wanted v grows to 1e8, of which float32 cannot tell
    1e-4. Each token's logits are less their largest, which u takes up: exp does not overflow, and S is the same but for the 1e-8.
    The host waits after every round.
    """
    tokens, experts = logits_NE.shape
    wide = logits_NE.to(torch.float64)
    matrix = torch.exp(wide - wide.amax(-1, keepdim=True)) if tokens else wide
    u, v = matrix.new_ones(tokens), matrix.new_ones(experts)
    for _ in range(rounds):
        before = v
        u = 1.0 / (max(1, tokens) * (matrix @ v + _TINY))
        v = 1.0 / (experts * (u @ matrix + _TINY))
        if not bool((v - before).abs().mean() > tolerance):
            break
    return u[:, None] * matrix * v


@torch.no_grad()
def experts_that_take(scores_NE: Tensor, top_k: int) -> Tensor:
    """[N, E] int64: in column e expert e where it takes the token, -1 elsewhere.

    Every expert takes its ceil(top_k * N / E) tokens of the highest score, equal scores by the earliest token.
    """
    tokens, experts = scores_NE.shape
    room = min(tokens, math.ceil(top_k * tokens / experts))
    best = highest(scores_NE.T, room)
    taken = torch.zeros_like(scores_NE.T, dtype=torch.bool).scatter_(1, best, True).T
    numbers = torch.arange(experts, device=scores_NE.device)
    return torch.where(taken, numbers, -1)


@torch.no_grad()
def quantiles(logits_NE: Tensor, bias_E: Tensor, top_k: int) -> Tensor:
    """What thresholds balance these tokens: [E] float64, zeros where there is no token. bias_E: the thresholds so far, negated.

    a_t is the (top_k + 1)-th highest of logit + bias, result e the (floor(N * top_k / E) + 1)-th highest of logit_te - a_t.
    """
    tokens, experts = logits_NE.shape
    wide = logits_NE.to(torch.float64)
    if not tokens:
        return wide.new_zeros(experts)
    last = (wide + bias_E).topk(top_k + 1, dim=-1).values[:, -1:]
    above = tokens * top_k // experts
    return (wide - last).topk(above + 1, dim=0).values[-1]
