"""Small models of declared tensors, a written-out AdamW in float64, for tests of the optimizers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from core.config.run import OptimizerConfig
from core.parallel.groups import Groups, one_rank
from core.state.box import part, whole
from core.state.spec import Constant, Normal, TensorSpec
from tests.core.numbers import draw

EXPERTS = (4, 3, 2)


class Tensors(nn.Module):
    """`matrix` [5, 3] with decay, `gain` [7] without, `bias` [4] untrained, and the rank's part of `experts` [4, 3, 2]."""

    def __init__(self, groups: Groups | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        ep = (groups or one_rank()).ep
        self.experts_box = part(EXPERTS, 0, ep.position, ep.size)
        self.matrix = nn.Parameter(draw(0, 5, 3).to(dtype))
        self.gain = nn.Parameter(draw(1, 7).to(dtype))
        self.experts = nn.Parameter(draw(2, *EXPERTS)[self.experts_box.slices].to(dtype))
        self.register_buffer("bias", torch.ones(4))

    def specs(self) -> dict[str, TensorSpec]:
        normal, one = Normal(std=1.0), Constant(value=1.0)
        return {
            "matrix": TensorSpec(shape=(5, 3), box=whole((5, 3)), replicas="dense", init=normal),
            "gain": TensorSpec(shape=(7,), box=whole((7,)), replicas="dense", init=one, decay=False),
            "experts": TensorSpec(shape=EXPERTS, box=self.experts_box, replicas="expert", init=normal),
            "bias": TensorSpec(shape=(4,), box=whole((4,)), replicas="dense", init=one, decay=False, trained=False),
        }


def gradient(step: int, name: str) -> Tensor:
    """The whole model's gradient of a step, float64."""
    shape = {"matrix": (5, 3), "gain": (7,), "experts": EXPERTS}[name]
    return draw(1000 * step + len(name), *shape) * (3.0 if name == "experts" else 1.0)


def plain_adamw(start: Tensor, gradients: list[Tensor], rates: list[float], c: OptimizerConfig, decay: float) -> Tensor:
    """The updates of arXiv 1711.05101 algorithm 2, written out."""
    w, m, v = start.double().clone(), torch.zeros_like(start.double()), torch.zeros_like(start.double())
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        m, v = c.beta1 * m + (1 - c.beta1) * g, c.beta2 * v + (1 - c.beta2) * g * g
        mean, square = m / (1 - c.beta1**t), v / (1 - c.beta2**t)
        w = w - rate * (mean / (square.sqrt() + c.eps) + decay * w)
    return w
