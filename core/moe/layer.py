"""The MoE layer: router, dispatch, experts, combine, and the shared experts beside them (report section 2)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from core.config.architecture import MoE
from core.layers.linear import Linear
from core.layers.mlp import MLP
from core.layers.place import Place
from core.moe.dispatch.counts import Moved, count_moved
from core.moe.dispatch.make import TOKEN_ONCE, dispatcher_name, make_dispatcher
from core.moe.experts import Experts
from core.moe.router import Router, RouterInputs, Routing


class MoELayer(nn.Module):
    """[T, hidden] to [T, hidden] and the routing, which carries losses and loads; T are the tokens of this rank alone."""

    def __init__(self, config: MoE, hidden: int, init_std: float, place: Place) -> None:
        super().__init__()
        self.router = Router(config, hidden, init_std=init_std, place=place)
        width = config.routed_width(hidden)
        self.experts = Experts(config, width, init_std=init_std, place=place)
        self.latent_down = self.latent_up = None
        if config.latent is not None:
            self.latent_down = Linear(hidden, width, init_std=init_std, place=place)
            self.latent_up = Linear(width, hidden, init_std=init_std, place=place)
        self.shared = self.shared_gate = None
        if config.shared is not None:
            shared = config.shared.count * config.expert_ffn
            self.shared = MLP(hidden, shared, init_std=init_std, place=place, activation=config.activation)
            self.shared_gate = Linear(hidden, 1, init_std=init_std, place=place) if config.shared.gated else None
        self.dispatcher = make_dispatcher(config, place)
        self.experts_per_rank = config.experts // place.groups.ep.size
        self.token_once = dispatcher_name(config, place) in TOKEN_ONCE

    def forward(self, hidden_TH: Tensor, inputs: RouterInputs) -> tuple[Tensor, Routing]:
        """inputs: what the router needs to know of these tokens."""
        routing = self.router(hidden_TH, inputs)
        entering = hidden_TH if self.latent_down is None else self.latent_down(hidden_TH)
        rows, plan = self.dispatcher.dispatch_preprocess(entering, routing)
        rows = self.dispatcher.dispatch(rows, plan)
        # While rows travel: of an all-to-all that is only begun, forward and backward, the time is hidden (report section 7.2).
        always = None if self.shared is None else self._shared(self.shared, hidden_TH, inputs.packing.rows)
        arrived, plan = self.dispatcher.dispatch_postprocess(rows, plan)
        out = self.dispatcher.combine_preprocess(self.experts(arrived), plan)
        out = self.dispatcher.combine(out, plan)
        out = self.dispatcher.combine_postprocess(out, plan)
        if self.latent_up is not None:
            out = self.latent_up(out)
        if always is not None:
            out = out + always
        return out, replace(routing, moved=self._moved(routing))

    def _moved(self, routing: Routing) -> Moved:
        return count_moved(
            routing.experts_TK,
            routing.chosen_TK,
            experts_per_rank=self.experts_per_rank,
            token_once=self.token_once,
        )

    def _shared(self, shared: MLP, hidden_TH: Tensor, rows: tuple[int, ...]) -> Tensor:
        """What the shared experts make of my tokens, and how much of it each token takes."""
        out = shared(hidden_TH, rows)
        return out if self.shared_gate is None else out * torch.sigmoid(self.shared_gate(hidden_TH))
