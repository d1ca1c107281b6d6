"""HybridEP as a dispatcher: tokens travel once, and kernels permute them for the experts where they arrive (report section 4.2.2; the
interface is that of github.com/deepseek-ai/DeepEP, branch hybrid-ep, deep_ep/hybrid_ep_buffer.py).

What one direction does in forward the other does in backward: combine is the transpose of dispatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.layers.place import Place
from core.moe.dispatch.package import load_deep_ep
from core.moe.dispatch.protocol import ExpertRows, Rows, experts_per_rank
from core.moe.router import Routing
from core.parallel.collectives import all_reduce_max

INSTALL = "DeepEP as the branch hybrid-ep of its repository says"
CALLS = {
    "HybridEPBuffer": (
        *("group", "hidden_dim", "max_num_of_tokens_per_rank", "num_local_experts"),
        *("num_sms_dispatch_api", "num_sms_combine_api"),
    ),
    "HybridEPBuffer.dispatch_with_permute": (
        "hidden",
        "routing_map",
        "probs",
        "num_of_experts_per_rank",
        "num_permuted_tokens",
        "pad_multiple",
        "handle",
    ),
    "HybridEPBuffer.combine_with_unpermute": ("hidden", "probs", "handle", "pad_multiple"),
}


@dataclass(kw_only=True)
class Trip:
    """One dispatch and its way back. tokens: of this rank, before its tokens were filled up; handle and counts: of the package."""

    buffer: Any
    routing_TE: Tensor
    tokens: int
    options: dict[str, Any]
    handle: Any = None
    counts: tuple[int, ...] = ()


class HybridEPDispatcher:
    """Experts lie in order over ep; etp must be 1. The kernels take bfloat16. multiple: every expert's rows are filled up to it there.

    The package is imported by the first dispatch. Raises RequestError there if it is not installed, or does not fit.
    """

    def __init__(self, experts: int, place: Place, multiple: int = 1) -> None:
        ep = place.groups.ep
        self.experts, self.local_experts, self.ep, self.multiple = experts, experts_per_rank(experts, ep), ep, multiple
        self.shared, self.processors = place.shared, place.dispatcher_sms

    def dispatch_preprocess(self, hidden_TH: Tensor, routing: Routing) -> tuple[Rows, Trip]:
        """Fill the tokens up to those of the rank that has most, as the package takes equally many of all; the host waits for that
        number. Choices and weights become [T, E]."""
        tokens = hidden_TH.shape[0]
        most = int(all_reduce_max(torch.tensor([tokens], device=hidden_TH.device), self.ep))
        more = (0, 0, 0, most - tokens)
        chosen, weights = F.pad(routing.experts_TK, more, value=-1), F.pad(routing.weights_TK.to(torch.float32), more)
        routed, column = chosen >= 0, chosen.clamp(min=0)
        # Added, not written: what is not routed stands at expert 0 with nothing.
        probs = weights.new_zeros(most, self.experts).scatter_add(1, column, weights * routed)
        wanted = torch.zeros_like(probs, dtype=torch.int32).scatter_add_(1, column, routed.to(torch.int32)) > 0
        trip = Trip(
            buffer=self._buffer(hidden_TH.shape[1], most),
            routing_TE=wanted,
            tokens=tokens,
            options={} if self.multiple == 1 else {"pad_multiple": self.multiple},
        )
        return Rows(hidden=F.pad(hidden_TH, more), weights=probs), trip

    def _buffer(self, hidden: int, tokens: int) -> Any:
        """The package's buffer for tokens of this width; it grows by itself when more of them come."""

        def make() -> Any:
            package: Any = load_deep_ep(CALLS, dispatcher="hybridep", install=INSTALL)
            number = self.processors
            own = {} if number is None else {"num_sms_dispatch_api": number, "num_sms_combine_api": number}
            return package.HybridEPBuffer(
                group=self.ep.handle,
                hidden_dim=hidden,
                max_num_of_tokens_per_rank=max(tokens, 1),
                num_local_experts=self.local_experts,
                **own,
            )

        return self.shared.get(f"hybridep {hidden} {self.local_experts}", make)

    def dispatch(self, rows: Rows, trip: Trip) -> Rows:
        """The package's dispatch and permutation; the host waits in it for the number of rows."""
        hidden, weights = _Dispatch.apply(rows.hidden, rows.weights, trip, self.local_experts)
        return Rows(hidden=hidden, weights=weights)

    def dispatch_postprocess(self, rows: Rows, trip: Trip) -> tuple[ExpertRows, Trip]:
        """Nothing is left to do: rows lie sorted by expert."""
        return ExpertRows(hidden_RH=rows.hidden, weights_R=rows.weights, counts=trip.counts), trip

    def combine_preprocess(self, rows_RH: Tensor, trip: Trip) -> Tensor:
        """Nothing is to be done: the package sums a token's rows itself."""
        return rows_RH

    def combine(self, rows_RH: Tensor, trip: Trip) -> Tensor:
        """The package's sums, at the ranks of the experts and at that of the token."""
        return _Combine.apply(rows_RH, trip)

    def combine_postprocess(self, rows_TH: Tensor, trip: Trip) -> Tensor:
        """My tokens without those that filled them up."""
        return rows_TH[: trip.tokens]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, probs: Tensor, trip: Trip, local_experts: int) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        out, weights, _, per_expert, trip.handle = trip.buffer.dispatch_with_permute(
            hidden=hidden.contiguous(),
            routing_map=trip.routing_TE,
            probs=probs.contiguous(),
            num_of_experts_per_rank=local_experts,
            **trip.options,
        )
        trip.counts = tuple(per_expert.tolist())
        return out, weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, probs = ctx.trip.buffer.combine_with_unpermute(
            hidden=grads[0].contiguous(), probs=grads[1].contiguous(), handle=ctx.trip.handle, **ctx.trip.options
        )
        return hidden, probs, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        out, _ = trip.buffer.combine_with_unpermute(hidden=rows.contiguous(), handle=trip.handle, **trip.options)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        out = ctx.trip.buffer.dispatch_with_permute(
            hidden=grads[0].contiguous(),
            num_permuted_tokens=sum(ctx.trip.counts),
            handle=ctx.trip.handle,
            **ctx.trip.options,
        )
        return out[0], None
