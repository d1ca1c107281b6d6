"""The router: scores, bias, groups, top-k, weights; always in float32 (report section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.attention.packing import Packing
from core.config.architecture import ExpertBias, MoE
from core.kernels.backend import wide_dtype
from core.kernels.routing import choose, scores_of, weights_of
from core.layers.place import Place
from core.moe.balance import BalanceLosses, BalanceScope, balance_losses
from core.moe.capacity import kept_choices
from core.state.box import whole
from core.state.spec import Constant, Normal, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Where a layer's tokens go.

    experts_TK: int64 expert of every choice, -1 for padding and for what an expert had no room for. weights_TK: float32, with gradient. counts_E: int64 choices per
    expert on this rank, of what is routed. balance: losses, None outside training.
    """

    experts_TK: Tensor
    weights_TK: Tensor
    counts_E: Tensor
    balance: BalanceLosses | None


class Router(nn.Module):
    """weight [E, hidden]; bias [E] float32 where the load is balanced by a bias: it moves the choice, never the weights."""

    bias: Tensor | None

    def __init__(self, config: MoE, hidden: int, *, init_std: float, place: Place) -> None:
        super().__init__()
        self.config = config
        self.init_std = init_std
        # Whole on every rank of tp, each of which routes other tokens.
        self.adjacent = place.groups.tp.size
        self.sequence = place.groups.sequence
        self.weight = nn.Parameter(place.empty(config.experts, hidden))
        biased = any(isinstance(balance, ExpertBias) for balance in config.router.balance)
        bias = torch.zeros(config.experts, dtype=torch.float32, device=place.device) if biased else None
        self.register_buffer("bias", bias)

    def specs(self) -> dict[str, TensorSpec]:
        """The declarations of the weight and, where there is one, of the bias."""
        shape = tuple(self.weight.shape)
        spec = TensorSpec(
            shape=shape, box=whole(shape), replicas="dense", init=Normal(std=self.init_std), adjacent=self.adjacent
        )
        found = {"weight": spec}
        if self.bias is not None:
            size, zero = tuple(self.bias.shape), Constant(value=0.0)
            found["bias"] = replace(spec, shape=size, box=whole(size), init=zero, decay=False, trained=False)
        return found

    def forward(
        self, hidden_TH: Tensor, packing: Packing, scope: BalanceScope | None, valid_T: Tensor | None = None
    ) -> Routing:
        """Route my tokens [T, hidden]; `scope` is given in training, when balance losses are wanted."""
        router, experts = self.config.router, self.config.experts
        wide = wide_dtype(hidden_TH.dtype)
        logits = F.linear(hidden_TH.to(wide), self.weight.to(wide))
        scores = scores_of(logits, router.score)
        chosen = choose(scores, self.config.top_k, router.groups, self.bias)
        weights = weights_of(scores, chosen, score=router.score, normalise=router.normalise, scale=router.scale)
        if valid_T is not None:
            chosen = chosen.masked_fill(~valid_T[:, None], -1)
            weights = weights * valid_T[:, None]
        if self.config.capacity is not None:
            kept = kept_choices(
                chosen,
                weights,
                packing,
                experts=experts,
                capacity=self.config.capacity,
                sequence=self.sequence,
            )
            chosen, weights = chosen.masked_fill(~kept, -1), weights * kept
        counts = torch.bincount((chosen.flatten() + 1), minlength=experts + 1)[1:]
        balance = None if scope is None else balance_losses(logits, router, self.config.top_k, scope)
        return Routing(experts_TK=chosen, weights_TK=weights, counts_E=counts, balance=balance)
