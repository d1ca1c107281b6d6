"""DeepEP as a dispatcher: a token goes once to each rank that holds some of its experts, by kernels over NVLink and RDMA
(report section 4.2.2; arXiv 2412.19437 section 3.2; the interface is that of github.com/deepseek-ai/DeepEP, deep_ep/buffer.py).

What one direction does in forward the other does in backward: combine is the transpose of dispatch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from core.kernels.permute import RowMap
from core.layers.place import Place
from core.moe.dispatch.expand import collect, expand, map_arrived
from core.moe.dispatch.package import load_deep_ep
from core.moe.dispatch.protocol import ExpertRows, Rows, experts_per_rank
from core.moe.router import Routing
from core.parallel.groups import Group

INSTALL = "DeepEP as its repository says"
CALLS = {
    "Buffer": ("group", "num_nvl_bytes", "num_rdma_bytes"),
    "Buffer.set_num_sms": ("new_num_sms",),
    "Buffer.get_dispatch_config": ("num_ranks",),
    "Buffer.get_combine_config": ("num_ranks",),
    "Buffer.get_dispatch_layout": ("topk_idx", "num_experts"),
    "Buffer.dispatch": (
        "x",
        "handle",
        "num_tokens_per_rank",
        "num_tokens_per_rdma_rank",
        "is_token_in_rank",
        "num_tokens_per_expert",
        "topk_idx",
        "topk_weights",
    ),
    "Buffer.combine": ("x", "handle", "topk_weights"),
}


@dataclass(kw_only=True)
class Trip:
    """One dispatch and its way back. layout: of the package, before it; handle, experts: of the package, after it."""

    buffer: Any
    layout: dict[str, Tensor | None]
    experts_TK: Tensor
    handle: Any = None
    experts_PK: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class DeepEPPlan:
    """The trip, and the map of my experts' rows once tokens have arrived."""

    trip: Trip
    arrived: RowMap | None = None


class DeepEPDispatcher:
    """Experts lie in order over ep; etp must be 1. The kernels take bfloat16. multiple: as of the token-once dispatcher of torch.

    The package is imported by the first dispatch. Raises RequestError there if it is not installed, or does not fit.
    """

    def __init__(self, experts: int, place: Place, multiple: int = 1) -> None:
        ep = place.groups.ep
        self.experts, self.local_experts, self.ep, self.multiple = experts, experts_per_rank(experts, ep), ep, multiple
        self.shared, self.processors = place.shared, place.dispatcher_sms

    def dispatch_preprocess(self, hidden_TH: Tensor, routing: Routing) -> tuple[Rows, DeepEPPlan]:
        """Ask the package how many tokens go where; nothing is communicated."""
        row_bytes = hidden_TH.shape[1] * max(hidden_TH.element_size(), 2)
        buffer = self.shared.get(f"deepep {row_bytes}", lambda: _buffer(self.ep, row_bytes, self.processors))
        per_rank, per_rdma_rank, per_expert, in_rank, _ = buffer.get_dispatch_layout(
            topk_idx=routing.experts_TK, num_experts=self.experts
        )
        layout = {
            "num_tokens_per_rank": per_rank,
            "num_tokens_per_rdma_rank": per_rdma_rank,
            "num_tokens_per_expert": per_expert,
            "is_token_in_rank": in_rank,
        }
        trip = Trip(buffer=buffer, layout=layout, experts_TK=routing.experts_TK)
        # The package carries weights as float32.
        return Rows(hidden=hidden_TH, weights=routing.weights_TK.to(torch.float32)), DeepEPPlan(trip=trip)

    def dispatch(self, rows: Rows, plan: DeepEPPlan) -> Rows:
        """The package's dispatch; the host waits in it for the number of tokens that come."""
        hidden, weights = _Dispatch.apply(rows.hidden, rows.weights, plan.trip)
        return Rows(hidden=hidden, weights=weights)

    def dispatch_postprocess(self, rows: Rows, plan: DeepEPPlan) -> tuple[ExpertRows, DeepEPPlan]:
        """A row for each choice of an expert of mine, sorted."""
        experts = plan.trip.experts_PK
        assert experts is not None, "dispatch comes first"
        arrived = map_arrived(experts, self.local_experts, multiple=self.multiple)
        return expand(rows, arrived), replace(plan, arrived=arrived)

    def combine_preprocess(self, rows_RH: Tensor, plan: DeepEPPlan) -> Tensor:
        """The sum of every token's rows at this rank: [P, H]."""
        assert plan.arrived is not None, "dispatch_postprocess comes first"
        return collect(rows_RH, plan.arrived)

    def combine(self, rows_PH: Tensor, plan: DeepEPPlan) -> Tensor:
        """The package's combine, which sums what the ranks made of a token."""
        return _Combine.apply(rows_PH, plan.trip)

    def combine_postprocess(self, rows_TH: Tensor, plan: DeepEPPlan) -> Tensor:
        """Nothing is left to do."""
        return rows_TH


def _buffer(ep: Group, row_bytes: int, processors: int | None) -> Any:
    """The package's buffers, as large as its own settings for so many ranks ask for. Every rank of ep makes them together.

    processors: of a GPU, for all of the package's kernels in this process; None leaves its own number.
    """
    package: Any = load_deep_ep(CALLS, dispatcher="deepep", install=INSTALL)
    if processors is not None:
        # Before its settings are asked for, which depend on it.
        package.Buffer.set_num_sms(new_num_sms=processors)
    settings = (package.Buffer.get_dispatch_config(ep.size), package.Buffer.get_combine_config(ep.size))
    nvlink = max(each.get_nvl_buffer_size_hint(row_bytes, ep.size) for each in settings)
    rdma = max(each.get_rdma_buffer_size_hint(row_bytes, ep.size) for each in settings)
    return package.Buffer(group=ep.handle, num_nvl_bytes=nvlink, num_rdma_bytes=rdma)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, trip: Trip) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        out, trip.experts_PK, weights, _, trip.handle, _ = trip.buffer.dispatch(
            x=hidden.contiguous(), topk_idx=trip.experts_TK, topk_weights=weights.contiguous(), **trip.layout
        )
        return out, weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weights, _ = ctx.trip.buffer.combine(
            x=grads[0].contiguous(), handle=ctx.trip.handle, topk_weights=grads[1].contiguous()
        )
        return hidden, weights, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        return trip.buffer.combine(x=rows.contiguous(), handle=trip.handle)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.buffer.dispatch(x=grads[0].contiguous(), handle=ctx.trip.handle)[0], None
