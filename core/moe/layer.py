"""The MoE layer: router, dispatch, experts, combine, and the shared experts beside them (report section 2)."""

from __future__ import annotations

from torch import Tensor, nn

from core.config.architecture import MoE
from core.layers.mlp import SwiGLU
from core.layers.place import Place
from core.moe.dispatch.allgather import AllGatherDispatcher
from core.moe.dispatch.alltoall import AllToAllDispatcher
from core.moe.dispatch.protocol import Dispatcher
from core.moe.experts import Experts
from core.moe.router import Router, RouterInputs, Routing


class MoELayer(nn.Module):
    """[T, hidden] to [T, hidden] and the routing, which carries losses and loads; T are the tokens of this rank alone."""

    def __init__(self, config: MoE, hidden: int, init_std: float, place: Place) -> None:
        super().__init__()
        self.router = Router(config, hidden, init_std=init_std, place=place)
        self.experts = Experts(config, hidden, init_std=init_std, place=place)
        shared = config.shared.count * config.expert_ffn if config.shared else 0
        self.shared = SwiGLU(hidden, shared, init_std=init_std, place=place) if config.shared else None
        self.dispatcher = make_dispatcher(config.experts, place)

    def forward(self, hidden_TH: Tensor, inputs: RouterInputs) -> tuple[Tensor, Routing]:
        """inputs: what the router needs to know of these tokens."""
        routing = self.router(hidden_TH, inputs)
        rows, plan = self.dispatcher.dispatch_preprocess(hidden_TH, routing)
        rows = self.dispatcher.dispatch(rows, plan)
        arrived, plan = self.dispatcher.dispatch_postprocess(rows, plan)
        out = self.dispatcher.combine_preprocess(self.experts(arrived), plan)
        out = self.dispatcher.combine(out, plan)
        out = self.dispatcher.combine_postprocess(out, plan)
        if self.shared is not None:
            out = out + self.shared(hidden_TH, inputs.packing.rows)
        return out, routing


def make_dispatcher(experts: int, place: Place) -> Dispatcher:
    """The dispatcher that the mapping names.

    Where etp alone spreads the experts, no row has a rank to go to: every rank needs every token, and gathers it once instead of
    once for each of its experts.
    """
    groups = place.groups
    if place.parallel.dispatcher == "allgather" or (groups.ep.size == 1 and groups.etp.size > 1):
        return AllGatherDispatcher(experts, groups)
    return AllToAllDispatcher(experts, groups)
