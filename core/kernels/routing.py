"""The arithmetic of the router, in float32 (semantics: report section 2.1; DeepSeek-V3, arXiv 2412.19437 section 2.1.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from core.config.architecture import Groups, Score


def scores_of(logits_TE: Tensor, score: Score) -> Tensor:
    """What the choice is made by, before any bias: [T, E]."""
    match score:
        case "sigmoid":
            return torch.sigmoid(logits_TE)
        case "sqrt_softplus":
            return F.softplus(logits_TE).sqrt()
        case "softmax":
            return torch.softmax(logits_TE, dim=-1)
        case "softmax_after_top_k":
            return logits_TE


def highest(scores_TE: Tensor, count: int) -> Tensor:
    """The positions of each row's `count` highest scores, best first, equal scores by lowest position: [T, count] int64.

    torch.topk alone picks any of equal scores, another one for another row length or device.
    """
    values, picked = scores_TE.topk(min(count + 1, scores_TE.shape[-1]), dim=-1)
    picked = picked[:, :count].contiguous()
    tied = (values[:, 1:] == values[:, :-1]).any(-1).nonzero()[:, 0]
    if tied.numel():
        picked[tied] = scores_TE[tied].sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return picked


def keep_groups(scores_TE: Tensor, groups: Groups) -> Tensor:
    """The scores with all but the `kept` best groups at -inf; a group counts the sum of its `best` highest scores."""
    tokens, experts = scores_TE.shape
    grouped = scores_TE.view(tokens, groups.total, experts // groups.total)
    of_group = grouped.topk(min(groups.best, grouped.shape[-1]), dim=-1).values.sum(-1)
    kept = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, highest(of_group, groups.kept), True)
    return grouped.masked_fill(~kept[:, :, None], float("-inf")).view(tokens, experts)


def choose(scores_TE: Tensor, top_k: int, groups: Groups | None, bias_E: Tensor | None) -> Tensor:
    """The top_k experts of every token by score plus bias, best first, ties by lowest id: [T, K] int64. No gradient."""
    selection = scores_TE.detach()
    if bias_E is not None:
        selection = selection + bias_E
    if groups is not None:
        selection = keep_groups(selection, groups)
    return highest(selection, top_k)


def weights_of(scores_TE: Tensor, experts_TK: Tensor, *, score: Score, normalise: bool, scale: float) -> Tensor:
    """The weights of the chosen experts, from unbiased scores, so that gradients reach the router: [T, K]."""
    chosen = scores_TE.gather(1, experts_TK)
    if score == "softmax_after_top_k":
        chosen = torch.softmax(chosen, dim=-1)
    elif normalise:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    return chosen * scale if scale != 1.0 else chosen


def within_capacity(
    experts_TK: Tensor, weights_TK: Tensor, order_T: Tensor, *, experts: int, capacity: int, by_weight: bool
) -> Tensor:
    """Which choices their experts keep, at most `capacity` each: [T, K] bool.

    experts_TK: -1 for a choice that is not routed, which nobody keeps. An expert keeps the choices of the highest weight, ties by
    the lowest order_T; or without by_weight those of the lowest order_T.
    """
    top_k = experts_TK.shape[1]
    flat = experts_TK.flatten()
    order = order_T.repeat_interleave(top_k).argsort(stable=True)
    if by_weight:
        order = order[weights_TK.detach().flatten()[order].argsort(descending=True, stable=True)]
    order = order[flat[order].argsort(stable=True)]
    sorted_experts = flat[order]
    counts = torch.bincount(sorted_experts + 1, minlength=experts + 1)
    place = torch.arange(order.numel(), device=order.device) - (counts.cumsum(0) - counts)[sorted_experts + 1]
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept[order] = (place < capacity) & (sorted_experts >= 0)
    return kept.view_as(experts_TK)


def balance_scores(logits_TE: Tensor, score: Score) -> Tensor:
    """Probabilities over all experts that the auxiliary losses see, apart from the routing: [T, E], rows add up to 1."""
    if score in ("sigmoid", "sqrt_softplus"):
        scores = scores_of(logits_TE, score)
        return scores / scores.sum(-1, keepdim=True)
    return torch.softmax(logits_TE, dim=-1)
