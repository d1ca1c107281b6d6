"""Dense and expert parameters under one optimizer: apart in where their copies lie, one in the norm of their gradient."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from core.config.run import OptimizerConfig
from core.optim.adam import AdamW
from core.optim.buckets import sum_over_replicas
from core.parallel.collectives import all_reduce_sum
from core.parallel.groups import Groups
from core.state.inventory import declared, piece_of
from core.state.sharded import ShardedTensor

# Elements whose squares are added in the gradients' own precision.
_NORM_ROW = 4096


class ChainedOptimizer:
    """AdamW over the dense parameters (copies over dp * cp) and over the experts (copies over edp).

    Losses are shares of one sum over the global batch, so every gradient is a plain sum over its copies (contract 4).
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, groups: Groups) -> None:
        trained = {name: entry for name, entry in declared(model).items() if entry.spec.trained}
        self.config = config
        self.groups = groups
        self.dense = AdamW({n: e for n, e in trained.items() if e.spec.replicas == "dense"}, config)
        self.expert = AdamW({n: e for n, e in trained.items() if e.spec.replicas == "expert"}, config)
        self.steps = 0

    def accumulate(self) -> None:
        """Take over the gradients that the last backward left."""
        self.dense.accumulate()
        self.expert.accumulate()

    def reduce(self) -> None:
        """Sum all main gradients over their copies: all-reduces in buckets over both groups."""
        sum_over_replicas(self.dense.gradients(), self.groups.replicas)
        sum_over_replicas(self.expert.gradients(), self.groups.edp)

    def step(self, rate: float, norm: float) -> None:
        """Scale gradients of the global norm `norm` down to clip_norm where they exceed it, and update every parameter."""
        limit = self.config.clip_norm
        if limit is not None and norm > limit:
            for gradient in (*self.dense.gradients(), *self.expert.gradients()):
                gradient.mul_(limit / norm)
        self.dense.step(rate)
        self.expert.step(rate)
        self.steps += 1

    def gradient_norm(self) -> float:
        """The norm of the whole model's gradient, each element counted once: experts are summed over the expert group."""
        dense, expert = (_sum_of_squares(kind.gradients()) for kind in (self.dense, self.expert))
        return float((dense + all_reduce_sum(expert, self.groups.ep)).sqrt())

    def state(self) -> list[ShardedTensor]:
        """Moments and masters as canonical state `optimizer.<kind>.<parameter>`, data shared with the optimizer."""
        return [
            piece_of(f"optimizer.{kind}.{name}", kind_of.slots[name].entry.spec, tensor, self.groups)
            for kind_of in (self.dense, self.expert)
            for kind, tensors in kind_of.state().items()
            for name, tensor in tensors.items()
        ]

    def set_steps(self, steps: int) -> None:
        """Continue as after `steps` updates."""
        self.steps = steps
        self.dense.set_steps(steps)
        self.expert.set_steps(steps)


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """The sum of squares of all elements, a float64 scalar.

    Torch adds up a float32 norm in float32: over tens of millions of elements that is a percent off, and by how much depends on
    how experts lie on ranks. Short rows are exact enough, and their sum is float64.
    """
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device if tensors else None)
    for tensor in tensors:
        flat = tensor.reshape(-1)
        full = flat.numel() // _NORM_ROW * _NORM_ROW
        for rows in (flat[:full].view(-1, _NORM_ROW), flat[None, full:]):
            total += torch.linalg.vector_norm(rows, dim=1).to(torch.float64).square().sum()
    return total
