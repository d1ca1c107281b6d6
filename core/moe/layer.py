"""The MoE layer: router, dispatch, experts, combine, and the shared experts beside them (report section 2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.config.architecture import MoE
from core.layers.linear import Linear
from core.layers.mlp import MLP
from core.layers.place import Place
from core.memory.recompute import recompute, recompute_with
from core.moe.dispatch.counts import Moved, count_moved
from core.moe.dispatch.make import TOKEN_ONCE, dispatcher_name, make_dispatcher
from core.moe.experts import Experts
from core.moe.router import Router, RouterInputs, Routing
from core.parallel.collectives import Packing


@dataclass(frozen=True, kw_only=True)
class Outbound:
    """What the first half of a layer tells the second beside its tensors: the routing, whose tensors pass no gradients on, the
    dispatcher's plan, and the names of the balance losses in their order."""

    routing: Routing
    plan: Any
    losses: tuple[str, ...]


class MoELayer(nn.Module):
    """[T, hidden] to [T, hidden] and the routing, which carries losses and loads; T are the tokens of this rank alone.

    A layer has two halves: `to_experts` ends before the rows travel home, `from_experts` brings them there and keeps nothing but where
    they go. With memory.recompute=moe the first half is made again in the backward, dispatch and its collectives included, while
    rows come home once. The routers choose anew, out of the same numbers, and nothing is counted: what is counted is told by the first run.
    memory.recompute=moe_act holds of itself: experts keep their rows and first products, and never the activations between
    (core/kernels/grouped_matmul.py), nor outputs (report section 4.1.2).
    """

    def __init__(self, config: MoE, hidden: int, init_std: float, place: Place) -> None:
        super().__init__()
        self.again = place.again("moe")
        place = place.inside("moe")
        self.router = Router(config, hidden, init_std=init_std, place=place)
        width = config.routed_width(hidden)
        self.experts = Experts(config, width, init_std=init_std, place=place)
        self.latent_down = self.latent_up = None
        if config.latent is not None:
            self.latent_down = Linear(hidden, width, init_std=init_std, place=place)
            self.latent_up = Linear(width, hidden, init_std=init_std, place=place)
        self.shared = self.shared_gate = None
        if config.shared is not None:
            self.shared_again, gated = place.again("shared_experts"), config.shared.gated
            self.shared = MLP(
                hidden,
                config.shared.count * config.expert_ffn,
                init_std=init_std,
                place=place,
                activation=config.activation,
                again=self.shared_again and not gated,
            )
            self.shared_gate = Linear(hidden, 1, init_std=init_std, place=place) if gated else None
        self.place, self.config = place, config
        self.dispatcher = make_dispatcher(config, place)
        self.experts_per_rank = config.experts // place.groups.ep.size
        self.token_once = dispatcher_name(config, place) in TOKEN_ONCE

    def align(self, multiple: int, packing: Packing | None = None) -> None:
        """Have rows of zeros fill those of every expert up to a multiple, for products that want one (report section 5.4.1).

        packing: how rows travel to their experts, where not as they are.
        """
        self.dispatcher = make_dispatcher(self.config, self.place, multiple=multiple, packing=packing)

    def forward(self, hidden_TH: Tensor, inputs: RouterInputs) -> tuple[Tensor, Routing]:
        """inputs: what the router needs to know of these tokens."""
        return self.from_experts(*self.to_experts(hidden_TH, inputs))

    def to_experts(self, hidden_TH: Tensor, inputs: RouterInputs) -> tuple[tuple[Tensor, ...], Outbound]:
        """All up to the experts' outputs in the order in which they go home; those, what the shared experts give, and balance losses."""
        half = partial(self._to_experts, inputs=inputs)
        return recompute_with(half, hidden_TH) if self.again else half(hidden_TH)

    def _to_experts(self, hidden_TH: Tensor, inputs: RouterInputs) -> tuple[tuple[Tensor, ...], Outbound]:
        routing = self.router(hidden_TH, inputs)
        entering = hidden_TH if self.latent_down is None else self.latent_down(hidden_TH)
        rows, plan = self.dispatcher.dispatch_preprocess(entering, routing)
        rows = self.dispatcher.dispatch(rows, plan)
        # While rows travel: of an all-to-all that is only begun, forward and backward, the time is hidden (report section 7.2).
        always = None if self.shared is None else self._shared(self.shared, hidden_TH, inputs.packing.rows)
        arrived, plan = self.dispatcher.dispatch_postprocess(rows, plan)
        out = self.dispatcher.combine_preprocess(self.experts(arrived), plan)
        if self.latent_up is not None:
            # This product keeps what has come home, so that it belongs to what may be made again.
            out = self.latent_up(self._home(out, plan))
        losses = {} if routing.balance is None else routing.balance.by_name
        tensors = (out, *(() if always is None else (always,)), *losses.values())
        routing = replace(routing, weights_TK=routing.weights_TK.detach())
        return tensors, Outbound(routing=routing, plan=plan, losses=tuple(losses))

    def from_experts(self, tensors: tuple[Tensor, ...], outbound: Outbound) -> tuple[Tensor, Routing]:
        """The rest of the layer, on what `to_experts` gave."""
        out, *others = tensors
        if self.latent_up is None:
            out = self._home(out, outbound.plan)
        if self.shared is not None:
            out = out + others.pop(0)
        routing = replace(outbound.routing, moved=self._moved(outbound.routing))
        if routing.balance is not None:
            losses = dict(zip(outbound.losses, others, strict=True))
            routing = replace(routing, balance=replace(routing.balance, by_name=losses))
        return out, routing

    def _home(self, rows_RH: Tensor, plan: Any) -> Tensor:
        """Every token's sum, at its own rank."""
        return self.dispatcher.combine_postprocess(self.dispatcher.combine(rows_RH, plan), plan)

    def _moved(self, routing: Routing) -> Moved:
        return count_moved(
            routing.experts_TK,
            routing.chosen_TK,
            experts_per_rank=self.experts_per_rank,
            token_once=self.token_once,
        )

    def _shared(self, shared: MLP, hidden_TH: Tensor, rows: tuple[int, ...]) -> Tensor:
        """What the shared experts make of my tokens, and how much of it each token takes."""
        gate = self.shared_gate
        if gate is None:
            return shared(hidden_TH, rows)

        def gated(hidden_TH: Tensor) -> Tensor:
            return shared(hidden_TH, rows) * torch.sigmoid(gate(hidden_TH))

        return recompute(gated, hidden_TH) if self.shared_again else gated(hidden_TH)
