"""Routing that is forced, so that speed and memory can be measured under a load that is known and can be had again.

Which experts a token gets depends on (name, seed, step, layer, place of the token in the global batch) alone: never on the mapping,
but that a hot rank is one of the mapping's. Weights stay those of the router, so that gradients flow; the losses mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from core.config.architecture import MoE
from core.config.run import WorkloadName
from core.state.box import whole
from core.state.seed import uniform


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Experts for the tokens of one microbatch, whose first lies at `first` in the global batch of `step`.

    layers: the MoE layers by canonical name. ep: ranks that share the experts.
    """

    name: WorkloadName
    seed: int
    step: int
    first: int
    layers: Mapping[str, MoE]
    ep: int

    def of(self, layer: str, mine_T: Tensor) -> Tensor:
        """[T, K] int64: K different experts for each of the tokens `mine_T` (int64, places in the microbatch)."""
        moe = self.layers[layer]
        found, left = [], moe.top_k
        for pool in self._pools(layer, moe):
            taken = min(left, len(pool))
            if taken:
                found.append(_dealt(pool, mine_T + self.first, taken))
            left -= taken
        assert left == 0, f"{layer} has {moe.experts} experts, fewer than top_k={moe.top_k}"
        return torch.cat(found, dim=1)

    def _pools(self, layer: str, moe: MoE) -> list[list[int]]:
        """Experts by preference: a token takes as many as it can of the first pool, then of the next. Within a pool all are used alike.

        The order of the experts is a random one, so that those of one token lie on several ranks as they do in training.
        """
        experts = self._shuffled(layer, moe.experts)
        match self.name:
            case "balanced":
                return [experts]
            case "hot_expert":
                return [experts[:1], experts[1:]]
            case "rotating":
                at = self.step % moe.experts
                return [experts[at : at + 1], experts[:at] + experts[at + 1 :]]
            case "hot_rank":
                held = moe.experts // self.ep
                hot = experts[0] // held
                return [[e for e in experts if e // held == hot], [e for e in experts if e // held != hot]]
            case "zero_load":
                used = max(moe.top_k, moe.experts // 2)
                return [[e for e in experts if e < used]]

    def _shuffled(self, layer: str, experts: int) -> list[int]:
        order: list[int] = uniform(self.seed, f"{layer}.workload", whole((experts,))).argsort().tolist()
        return order


def _dealt(pool: list[int], tokens_T: Tensor, taken: int) -> Tensor:
    """`taken` experts of the pool for each token, dealt like cards: neighbouring tokens together use all of them equally often."""
    places = tokens_T[:, None] * taken + torch.arange(taken, device=tokens_T.device)
    return torch.tensor(pool, device=tokens_T.device)[places % len(pool)]
