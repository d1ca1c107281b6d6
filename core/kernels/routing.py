"""The arithmetic of the router, in float32 (semantics: report section 2.1; DeepSeek-V3, arXiv 2412.19437 section 2.1.2).

First the pieces, whose composition is the definition; then the three steps that run as one kernel each (report section 4.3.4):
`route`, `balance_choices`, `auxiliary_loss`. Those run Triton on float32 where `kernels_backend` says so, the pieces elsewhere.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from core.config.architecture import Groups, Router, Score
from core.kernels.backend import kernels_backend

# What one program of the kernels holds of a token.
_MOST_EXPERTS = 1024


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

    torch.topk alone picks any of equal scores, another one for another row length or device. Sorting keeps their order and lets
    the host wait for nothing; on a CPU, where the host is the device, it is slower than sorting only the rows with equal scores.
    """
    if scores_TE.device.type != "cpu":
        return scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()
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
    # Added best first, so that the sum does not depend on the device: groups that tie must tie everywhere.
    best = grouped.topk(min(groups.best, grouped.shape[-1]), dim=-1).values
    of_group = reduce(torch.add, best.unbind(-1))
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
    experts_TK: Tensor, weights_TK: Tensor, order_T: Tensor, *, experts: int, capacity: int | Tensor, by_weight: bool
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
    counts = occurrences(sorted_experts + 1, experts + 1)
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


def occurrences(index: Tensor, size: int) -> Tensor:
    """How often each number in [0, size) occurs: int64 [size]. torch.bincount would let the host wait for a GPU's largest."""
    if index.device.type == "cpu":
        return torch.bincount(index.flatten(), minlength=size)
    flat = index.flatten()
    return flat.new_zeros(size).scatter_add_(0, flat, torch.ones_like(flat))


def route(
    logits_TE: Tensor, router: Router, top_k: int, *, bias_E: Tensor | None = None, valid_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The experts of every token, int64 [T, K], best first, and their weights [T, K]: `route_reference` in one pass.

    bias_E: float32, moves the choice only. valid_T: bool; a token that is False gets experts -1 and weights zero. The gradient of the
    weights is computed from what forward keeps: the scores [T, E] of a softmax over all experts, otherwise the K chosen ones.
    Of two scores within a rounding of each other the kernel may see the other as the higher; equal logits are equal in both.
    """
    return _Route.apply(logits_TE, bias_E, valid_T, router, top_k)


def route_reference(
    logits_TE: Tensor, router: Router, top_k: int, *, bias_E: Tensor | None = None, valid_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition of `route`: scores, bias, groups, top-k, weights."""
    scores = scores_of(logits_TE, router.score)
    experts = choose(scores, top_k, router.groups, bias_E)
    weights = weights_of(scores, experts, score=router.score, normalise=router.normalise, scale=router.scale)
    if valid_T is None:
        return experts, weights
    return experts.masked_fill(~valid_T[:, None], -1), weights * valid_T[:, None]


def balance_choices(
    logits_TE: Tensor, score: Score, top_k: int, valid_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`balance_scores` and their plain top-k as 0/1, both [T, E]: bias and groups do not enter, padding is zero in both."""
    return _BalanceChoices.apply(logits_TE, valid_T, score, top_k)


def balance_choices_reference(
    logits_TE: Tensor, score: Score, top_k: int, valid_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition of `balance_choices`."""
    scores = balance_scores(logits_TE, score)
    picked = highest(scores.detach(), top_k)
    chosen = torch.zeros_like(scores).scatter_(1, picked, 1.0)
    if valid_T is not None:
        keep = valid_T[:, None].to(scores.dtype)
        scores, chosen = scores * keep, chosen * keep
    return scores, chosen.detach()


def auxiliary_loss(scores_TE: Tensor, counts_SE: Tensor, factor_S: Tensor, piece_T: Tensor | None = None) -> Tensor:
    """sum over pieces s of factor_s * sum_i counts_si * sum over its tokens x of scores_i(x): scalar, without gradient of the counts.

    piece_T: int64 piece of every token in [0, S); None where there is one piece. With factor E / (K * T^2) it is the auxiliary loss
    of T tokens (arXiv 2101.03961 section 2.2; report section 2.2).
    """
    return _AuxiliaryLoss.apply(scores_TE, counts_SE, factor_S, piece_T)


def auxiliary_loss_reference(
    scores_TE: Tensor, counts_SE: Tensor, factor_S: Tensor, piece_T: Tensor | None = None
) -> Tensor:
    """The definition of `auxiliary_loss`."""
    if piece_T is None:
        sums_SE = scores_TE.sum(0, keepdim=True)
    else:
        sums_SE = torch.zeros_like(counts_SE).index_add(0, piece_T, scores_TE)
    return ((counts_SE * sums_SE).sum(1) * factor_S).sum()


def _by_kernel(scores_TE: Tensor) -> bool:
    """Whether the Triton kernels take these scores."""
    fits = scores_TE.dtype == torch.float32 and scores_TE.shape[1] <= _MOST_EXPERTS
    return fits and kernels_backend(scores_TE.device) == "triton"


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, bias: Tensor | None, valid: Tensor | None, router: Router, top_k: int
    ) -> tuple[Tensor, Tensor]:
        ctx.by_kernel, ctx.router, ctx.experts = _by_kernel(logits), router, logits.shape[1]
        if ctx.by_kernel:
            from core.kernels.triton.routing import route_forward

            experts, weights, kept = route_forward(logits, router, top_k, bias, valid)
        else:
            experts, weights = route_reference(logits, router, top_k, bias_E=bias, valid_T=valid)
            kept = scores_of(logits, router.score)
            if router.score != "softmax":
                kept = kept.gather(1, experts.clamp(min=0))
        ctx.save_for_backward(experts, kept)
        ctx.mark_non_differentiable(experts)
        return experts, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        experts, kept = ctx.saved_tensors
        if ctx.by_kernel:
            from core.kernels.triton.routing import route_backward
        else:
            route_backward = _route_backward
        return route_backward(grads[1], experts, kept, ctx.router, ctx.experts), None, None, None, None


def _route_backward(grad_TK: Tensor, experts_TK: Tensor, kept: Tensor, router: Router, experts: int) -> Tensor:
    """The gradient of the logits [T, E]. kept: scores [T, E] of a softmax over all experts, otherwise the chosen ones [T, K]."""
    index_TK = experts_TK.clamp(min=0)
    grad = grad_TK * (experts_TK >= 0) * router.scale
    chosen = kept.gather(1, index_TK) if router.score == "softmax" else kept
    if router.score == "softmax_after_top_k":
        weights = torch.softmax(chosen, dim=-1)
        grad = weights * (grad - (weights * grad).sum(-1, keepdim=True))
    elif router.normalise:
        total = chosen.sum(-1, keepdim=True) + 1e-20
        grad = (grad - (grad * chosen).sum(-1, keepdim=True) / total) / total
    dense = grad.new_zeros(grad.shape[0], experts)
    if router.score == "softmax":
        dense.scatter_add_(1, index_TK, grad)
        return kept * (dense - (kept * dense).sum(-1, keepdim=True))
    # Added, not written: the choices of padding all stand at expert 0.
    return dense.scatter_add_(1, index_TK, grad * _slope(chosen, router.score))


def _slope(scores: Tensor, score: Score) -> Tensor:
    """The derivative of a score by its logit, from the score alone."""
    match score:
        case "sigmoid":
            return scores * (1 - scores)
        case "sqrt_softplus":
            # The sigmoid of the logit is 1 - exp(-score^2); a score that is zero has no slope left.
            return torch.where(scores > 0, -torch.expm1(-scores * scores) / (2 * scores), 0)
    return torch.ones_like(scores)


class _BalanceChoices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, valid: Tensor | None, score: Score, top_k: int) -> tuple[Tensor, Tensor]:
        ctx.by_kernel, ctx.score = _by_kernel(logits), score
        if ctx.by_kernel:
            from core.kernels.triton.routing import balance_forward

            scores, chosen, total = balance_forward(logits, score, top_k, valid)
        else:
            scores, chosen = balance_choices_reference(logits, score, top_k, valid)
            total = scores_of(logits, score).sum(-1) if score in ("sigmoid", "sqrt_softplus") else None
        ctx.save_for_backward(scores, total)
        ctx.mark_non_differentiable(chosen)
        return scores, chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        scores, total = ctx.saved_tensors
        if ctx.by_kernel:
            from core.kernels.triton.routing import balance_backward
        else:
            balance_backward = _balance_backward
        return balance_backward(grads[0], scores, total, ctx.score), None, None, None


def _balance_backward(grad_TE: Tensor, scores_TE: Tensor, total_T: Tensor | None, score: Score) -> Tensor:
    """The gradient of the logits [T, E]; total_T: sum of a token's scores before they were divided by it, None for a softmax."""
    centred = grad_TE - (grad_TE * scores_TE).sum(-1, keepdim=True)
    if total_T is None:
        return scores_TE * centred
    total = total_T[:, None]
    return centred / total * _slope(scores_TE * total, score)


class _AuxiliaryLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, counts: Tensor, factor: Tensor, piece: Tensor | None) -> Tensor:
        ctx.by_kernel, ctx.tokens = _by_kernel(scores), scores.shape[0]
        ctx.save_for_backward(counts, factor, piece)
        if ctx.by_kernel:
            from core.kernels.triton.routing import auxiliary_forward

            return auxiliary_forward(scores, counts, factor, piece)
        return auxiliary_loss_reference(scores, counts, factor, piece)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        counts, factor, piece = ctx.saved_tensors
        if ctx.by_kernel:
            from core.kernels.triton.routing import auxiliary_backward

            return auxiliary_backward(grads[0], counts, factor, piece, ctx.tokens), None, None, None
        load_SE = counts * (factor * grads[0])[:, None]
        grad = load_SE.expand(ctx.tokens, -1) if piece is None else load_SE.index_select(0, piece)
        return grad, None, None, None
