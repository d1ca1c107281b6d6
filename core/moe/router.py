"""The router: scores, bias, groups, top-k, weights (report section 2.1.2)."""

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

    experts_TK: int64 expert of every choice, -1 for padding and for what an expert had no room for. weights_TK: in the router's
    dtype, with gradient, zero where the expert is -1. counts_E: int64 choices per expert on this rank, of what is routed. chosen_TK:
    the experts before any was dropped (None: as experts_TK). balance: losses, None outside training.
    """

    experts_TK: Tensor
    weights_TK: Tensor
    counts_E: Tensor
    balance: BalanceLosses | None
    chosen_TK: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class RouterInputs:
    """What a router needs to know of my tokens beside their hidden states.

    packing says which tokens of the microbatch they are. scope: in training, when balance losses are wanted. valid_T: bool, False
    for padding, which reaches no expert. prescribed_TK: int64 [T, K], experts to take instead of its own choice, -1 for none; weights
    are computed as ever, from this router's scores at those experts. noise_TH: factors on what the router sees of its input.
    """

    packing: Packing
    scope: BalanceScope | None = None
    valid_T: Tensor | None = None
    prescribed_TK: Tensor | None = None
    noise_TH: Tensor | None = None


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

    def forward(self, hidden_TH: Tensor, inputs: RouterInputs) -> Routing:
        """Route my tokens [T, hidden]."""
        router, experts = self.config.router, self.config.experts
        wide = torch.float64 if router.dtype == "float64" else wide_dtype(hidden_TH.dtype)
        seen = hidden_TH.to(wide)
        if inputs.noise_TH is not None:
            seen = seen * inputs.noise_TH.to(wide)
        logits = F.linear(seen, self.weight.to(wide))
        chosen, weights = self._choices(logits, inputs)
        kept, before = chosen, None
        if self.config.capacity is not None:
            room = kept_choices(
                chosen,
                weights,
                inputs.packing,
                experts=experts,
                capacity=self.config.capacity,
                sequence=self.sequence,
            )
            kept, weights, before = chosen.masked_fill(~room, -1), weights * room, chosen
        counts = torch.bincount((kept.flatten() + 1), minlength=experts + 1)[1:]
        scope = inputs.scope
        balance = None if scope is None else balance_losses(logits, router, self.config.top_k, scope)
        return Routing(experts_TK=kept, weights_TK=weights, counts_E=counts, balance=balance, chosen_TK=before)

    def _choices(self, logits_TE: Tensor, inputs: RouterInputs) -> tuple[Tensor, Tensor]:
        """Experts and weights of every choice, both [T, K]; -1 and zero for padding and where nothing was prescribed."""
        router = self.config.router
        scores = scores_of(logits_TE, router.score)
        chosen, routed_TK = inputs.prescribed_TK, None
        if chosen is None:
            chosen = choose(scores, self.config.top_k, router.groups, self.bias)
        else:
            routed_TK = chosen >= 0
        if inputs.valid_T is not None:
            valid_T1 = inputs.valid_T[:, None]
            routed_TK = valid_T1 if routed_TK is None else routed_TK & valid_T1
        known = chosen.clamp(min=0)
        weights = weights_of(scores, known, score=router.score, normalise=router.normalise, scale=router.scale)
        if routed_TK is not None:
            chosen, weights = chosen.masked_fill(~routed_TK, -1), weights * routed_TK
        return chosen, weights
