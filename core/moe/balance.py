"""What keeps the experts evenly used: auxiliary losses, z-loss, and the bias that follows the load or quantiles of the logits.

Every loss is a share of one sum over the global batch (contract 4): summed over microbatches and ranks, balanced routing gives
exactly the coefficient, whatever the mapping. Counts carry no gradient. (Switch: arXiv 2101.03961; report section 2.2;
DeepSeek-V3: arXiv 2412.19437 sections 2.1.2.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core.config.architecture import AuxLoss, Router, ZLoss
from core.kernels.backend import kernels_backend
from core.kernels.routing import auxiliary_loss, balance_choices, balance_choices_reference
from core.parallel.collectives import all_reduce_sum
from core.parallel.groups import Group


@dataclass(frozen=True, kw_only=True)
class Load:
    """How often each expert was the choice of the balance scores: counts_E int64, over `tokens` tokens (float scalar tensor)."""

    counts_E: Tensor
    tokens: Tensor


@dataclass(frozen=True, kw_only=True)
class BalanceScope:
    """What the balance of one layer in one microbatch is measured over.

    sequence_T: int64, the sequence of the microbatch that each of my tokens belongs to; sequences: how many there are.
    valid_T: bool, False for padding (None: no padding). global_tokens: tokens of the global batch without padding. seen: load of
    the whole world in the earlier microbatches of this global batch, where the model balances over the global batch and there
    was one. sequence: the ranks that share the tokens of the microbatch; tokens: those that share the global batch.
    """

    sequence_T: Tensor
    sequences: int
    valid_T: Tensor | None
    global_tokens: int
    seen: Load | None
    sequence: Group
    tokens: Group


@dataclass(frozen=True, kw_only=True)
class BalanceLosses:
    """Shares of the global losses by name (`aux_microbatch`, `aux_sequence`, `aux_global_batch`, `z`), coefficients applied.

    load: of the whole world up to and including this microbatch, where the model balances over the global batch. quantiles: where
    thresholds balance, float64 [E + 1]: the quantiles of this microbatch and the number 1, so that sums over microbatches and ranks
    hold their sum and their number; zeros without tokens, and on all ranks of the microbatch but the first.
    """

    by_name: dict[str, Tensor]
    load: Load | None
    quantiles: Tensor | None = None


def balance_losses(logits_TE: Tensor, router: Router, top_k: int, scope: BalanceScope) -> BalanceLosses:
    """Every loss that `router` declares, on the float32 logits [T, E] of one layer.

    Communicates counts only: [E] or [sequences, E] over the ranks of the microbatch, and for `global_batch` [E] over the stage.
    """
    by_name: dict[str, Tensor] = {}
    load = None
    aux = [balance for balance in router.balance if isinstance(balance, AuxLoss)]
    if aux:
        scores_TE, chosen_TE = _scores_and_choices(logits_TE, router, top_k, scope.valid_T)
    for balance in router.balance:
        if isinstance(balance, ZLoss):
            by_name["z"] = balance.coefficient * _z_loss(logits_TE, scope)
        elif isinstance(balance, AuxLoss):
            if balance.scope == "global_batch":
                load = _global_load(chosen_TE, scope)
                value = _against_load(scores_TE, load, top_k, scope)
            else:
                pieces = scope.sequences if balance.scope == "sequence" else 1
                value = _per_piece(scores_TE, chosen_TE, pieces, top_k, scope)
            by_name[f"aux_{balance.scope}"] = balance.coefficient * value
    return BalanceLosses(by_name=by_name, load=load)


def loss_names(router: Router) -> list[str]:
    """Under which names `balance_losses` gives the losses that `router` declares."""
    found = []
    for balance in router.balance:
        if isinstance(balance, ZLoss):
            found.append("z")
        elif isinstance(balance, AuxLoss):
            found.append(f"aux_{balance.scope}")
    return found


def moved_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """The expert bias after one step: up by `rate` for experts below the mean load, down above it, unmoved at it.

    counts_E: final choices of the whole global batch, summed over all ranks. The bias is not recentred: only differences
    between experts change the choice.
    """
    # In float64, which holds every count and their sum exactly: a balanced expert must not move.
    counts = counts_E.to(torch.float64)
    return bias_E + (rate * torch.sign(counts.sum() - counts * counts.numel())).to(bias_E.dtype)


def moved_thresholds(bias_E: Tensor, quantiles: Tensor, ema: float) -> Tensor:
    """The bias of quantile balancing after one step; the thresholds are its negative.

    quantiles: [E + 1] of `BalanceLosses`, summed over the whole global batch. Their mean becomes the thresholds, `ema` of the old
    ones being kept, less the mean over experts. Unmoved where no microbatch had a token.
    """
    sums, number = quantiles[:-1].to(torch.float64), quantiles[-1]
    if not number:
        return bias_E.clone()
    moved = ema * bias_E.to(torch.float64) - (1 - ema) * sums / number
    return (moved - moved.mean()).to(bias_E.dtype)


def _scores_and_choices(logits_TE: Tensor, router: Router, top_k: int, valid_T: Tensor | None) -> tuple[Tensor, Tensor]:
    """Balance scores and their plain top-k as 0/1, both [T, E] float: bias and groups do not enter, padding is zero."""
    in_one = kernels_backend(logits_TE.device) == "triton"
    choices = balance_choices if in_one else balance_choices_reference
    return choices(logits_TE, router.score, top_k, valid_T)


def _z_loss(logits_TE: Tensor, scope: BalanceScope) -> Tensor:
    """This microbatch's share of the mean over tokens of logsumexp(logits)^2."""
    squares = torch.logsumexp(logits_TE, dim=-1).square()
    if scope.valid_T is not None:
        squares = squares * scope.valid_T
    return squares.sum() / max(1, scope.global_tokens)


def _per_piece(scores_TE: Tensor, chosen_TE: Tensor, pieces: int, top_k: int, scope: BalanceScope) -> Tensor:
    """My tokens' share of the sum over pieces of (tokens of the piece / tokens of the global batch) * E * sum_i f_i P_i.

    A piece is a sequence, or the whole microbatch. f_i = counts / (K * tokens) and P_i = mean score, both over the piece, whose
    tokens lie on several ranks: counts are summed over them, scores need not be, for the loss is linear in them. Weighting by
    tokens makes the sum over all pieces a mean over tokens, so that it does not depend on where a piece lies.
    """
    piece_T = None if pieces == 1 else scope.sequence_T
    if piece_T is None:
        counts_SE = chosen_TE.sum(0, keepdim=True)
    else:
        counts_SE = chosen_TE.new_zeros(pieces, chosen_TE.shape[1]).index_add(0, piece_T, chosen_TE)
    counts_SE = all_reduce_sum(counts_SE, scope.sequence)
    tokens_S = counts_SE.sum(1).clamp(min=1.0) / top_k
    factor_S = scores_TE.shape[1] / (top_k * max(1, scope.global_tokens)) / tokens_S
    return auxiliary_loss(scores_TE, counts_SE, factor_S, piece_T)


def _global_load(chosen_TE: Tensor, scope: BalanceScope) -> Load:
    """The load of the world over this global batch so far; one all-reduce of E + 1 numbers."""
    counts = chosen_TE.sum(0)
    tokens = (
        chosen_TE.new_tensor(float(chosen_TE.shape[0])) if scope.valid_T is None else scope.valid_T.sum().to(counts)
    )
    summed = all_reduce_sum(torch.cat([counts, tokens[None]]), scope.tokens)
    if scope.seen is not None:
        summed = summed + torch.cat([scope.seen.counts_E, scope.seen.tokens[None]])
    return Load(counts_E=summed[:-1], tokens=summed[-1])


def _against_load(scores_TE: Tensor, load: Load, top_k: int, scope: BalanceScope) -> Tensor:
    """This microbatch's share of E * sum_i f_i P_i, with f of the global batch so far and P of the global batch."""
    factor = scores_TE.shape[1] / (top_k * max(1, scope.global_tokens)) / load.tokens.clamp(min=1.0)
    return auxiliary_loss(scores_TE, load.counts_E[None], factor[None])
