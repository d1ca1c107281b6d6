"""The router: scores, bias, groups, top-k, weights (report section 2.1.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from core.attention.packing import Packing
from core.config.architecture import ExpertChoice, MoE, QuantileBias, TopK
from core.kernels.backend import kernels_backend, wide_dtype
from core.kernels.routing import choose, occurrences, route, scores_of, weights_of
from core.layers.place import Place
from core.moe.balance import BalanceLosses, BalanceScope, balance_losses
from core.moe.capacity import kept_choices, static_rows, within_budget
from core.moe.dispatch.counts import Moved
from core.moe.insight import logit_size
from core.moe.selection import chosen_together, quantiles, whole_microbatch
from core.precision.matmul import wide_linear
from core.state.box import whole
from core.state.spec import Constant, Normal, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Where a layer's tokens go.

    experts_TK: int64 expert of every choice, -1 for padding and for what an expert had no room for; where experts choose, E columns,
    of which column e is expert e or -1. weights_TK: in the router's dtype, with gradient, zero where the expert is -1. counts_E: int64
    choices per expert on this rank, of what is routed. chosen_TK: the experts before any was dropped (None: as experts_TK). balance:
    losses, None outside training. static_rows: so many rows go to each expert from every rank, rows of zeros among them; None: as
    many as are routed. moved: what the dispatcher made of it, once the layer has run. logit_size: as of `core.moe.insight`.
    """

    experts_TK: Tensor
    weights_TK: Tensor
    counts_E: Tensor
    balance: BalanceLosses | None
    chosen_TK: Tensor | None = None
    static_rows: int | None = None
    moved: Moved | None = None
    logit_size: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class RouterInputs:
    """What a router needs to know of my tokens beside their hidden states.

    packing says which tokens of the microbatch they are. scope: given in training and nowhere else: with it there are balance losses,
    and choices that look at a whole microbatch do. valid_T: bool, False for padding, which reaches no expert. prescribed_TK: int64
    [T, K], experts to take instead of its own choice, -1 for none; weights are computed as ever, from this router's scores at those
    experts. noise_TH: factors on what the router sees of its input.
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
        self.groups, self.budget = place.groups, place.parallel.expert_budget
        self.weight = nn.Parameter(place.empty(config.experts, hidden))
        bias = torch.zeros(config.experts, dtype=torch.float32, device=place.device) if config.router.biased else None
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
        seen = hidden_TH
        if inputs.noise_TH is not None:
            seen = seen.to(wide) * inputs.noise_TH.to(seen.device, wide)
        logits = wide_linear(seen, self.weight, wide)
        chosen, weights = self._choices(logits, inputs)
        room = self._room(chosen, weights, inputs)
        kept, before = chosen, None
        if room is not None:
            kept, weights, before = chosen.masked_fill(~room, -1), weights * room.to(weights.device), chosen
        counts = occurrences(kept + 1, experts + 1)[1:]
        scope = inputs.scope
        balance = None
        if scope is not None:
            balance = balance_losses(logits, router, self.config.top_k, scope)
            if any(isinstance(part, QuantileBias) for part in router.balance):
                balance = replace(balance, quantiles=self._quantiles(logits, inputs))
        return Routing(
            experts_TK=kept,
            weights_TK=weights,
            counts_E=counts,
            balance=balance,
            chosen_TK=before,
            static_rows=self.static_rows(inputs),
            logit_size=logit_size(logits, inputs.valid_T),
        )

    def _room(self, chosen_TK: Tensor, weights_TK: Tensor, inputs: RouterInputs) -> Tensor | None:
        """Which choices their experts, or the ranks of those, have room for: [T, K] bool; None where nothing is ever dropped."""
        experts, top_k, capacity = self.config.experts, self.config.top_k, self.config.capacity
        if capacity is not None:
            return kept_choices(
                chosen_TK, weights_TK, inputs.packing, experts=experts, capacity=capacity, sequence=self.sequence
            )
        if self.budget is None:
            return None
        return within_budget(chosen_TK, experts=experts, top_k=top_k, budget=self.budget, ep=self.groups.ep)

    def static_rows(self, inputs: RouterInputs) -> int | None:
        """`Routing.static_rows`: in training alone, where every microbatch has as many tokens."""
        config = self.config
        if config.capacity is None or not config.capacity.pad or inputs.scope is None:
            return None
        return static_rows(
            config.capacity, inputs.packing, top_k=config.top_k, experts=config.experts, groups=self.groups
        )

    def _choices(self, logits_TE: Tensor, inputs: RouterInputs) -> tuple[Tensor, Tensor]:
        """Experts and weights of every choice, both [T, K]; -1 and zero for padding and where nothing was prescribed."""
        router = self.config.router
        if self._in_one(logits_TE, inputs):
            return route(logits_TE, router, self.config.top_k, bias_E=self.bias, valid_T=inputs.valid_T)
        scores = scores_of(logits_TE, router.score)
        chosen, routed_TK = inputs.prescribed_TK, None
        if chosen is None:
            chosen = self._own_choices(logits_TE, scores, inputs)
            if isinstance(router.selection, ExpertChoice):
                routed_TK = chosen >= 0
        else:
            routed_TK = chosen >= 0
        if inputs.valid_T is not None:
            valid_T1 = inputs.valid_T[:, None]
            routed_TK = valid_T1 if routed_TK is None else routed_TK & valid_T1
        known = chosen.clamp(min=0)
        weights = weights_of(scores, known, score=router.score, normalise=router.normalise, scale=router.scale)
        if routed_TK is not None:
            # Weights of a plan have no data, and lie elsewhere than the choices, which have.
            chosen, weights = chosen.masked_fill(~routed_TK, -1), weights * routed_TK.to(weights.device)
        return chosen, weights

    def _in_one(self, logits_TE: Tensor, inputs: RouterInputs) -> bool:
        """Whether one kernel makes the whole choice: the plain one, top-k of the scores, where kernels run."""
        router = self.config.router
        plain = inputs.prescribed_TK is None and (inputs.scope is None or isinstance(router.selection, TopK))
        by_logits = any(isinstance(part, QuantileBias) for part in router.balance)
        return plain and not by_logits and kernels_backend(logits_TE.device) == "triton"

    def _own_choices(self, logits_TE: Tensor, scores_TE: Tensor, inputs: RouterInputs) -> Tensor:
        """The experts that this router chooses, int64 [T, K], or [T, E] where experts choose; without gradient.

        With Sinkhorn and expert choice in training communicates as `whole_microbatch`.
        """
        router, top_k = self.config.router, self.config.top_k
        if inputs.scope is not None and not isinstance(router.selection, TopK):
            return chosen_together(
                logits_TE,
                router.selection,
                top_k,
                valid_T=inputs.valid_T,
                packing=inputs.packing,
                sequence=self.sequence,
            )
        by_logits = any(isinstance(part, QuantileBias) for part in router.balance)
        return choose(logits_TE if by_logits else scores_TE, top_k, router.groups, self.bias)

    @torch.no_grad()
    def _quantiles(self, logits_TE: Tensor, inputs: RouterInputs) -> Tensor:
        """`BalanceLosses.quantiles` of this microbatch: [E + 1]. Communicates as `whole_microbatch`."""
        assert self.bias is not None, "quantile balancing keeps its thresholds in the bias"
        rows = whole_microbatch(logits_TE, inputs.valid_T, inputs.packing, self.sequence).rows_NE
        counted = float(rows.shape[0] > 0 and self.sequence.position == 0)
        found = quantiles(rows, self.bias, self.config.top_k)
        return torch.cat([found, found.new_ones(1)]) * counted
