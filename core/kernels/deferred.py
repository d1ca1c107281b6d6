"""Weight gradients that are put off: what lets a zero-bubble schedule send input gradients on before it computes the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(kw_only=True)
class Deferred:
    """While `collecting`, backward passes leave the work of weight gradients here instead of doing it (arXiv 2401.10241).

    One is handed to all products of a stage; nothing is put off unless its owner says so.
    """

    collecting: bool = False
    work: list[Callable[[], None]] = field(default_factory=list)

    def put(self, weight: nn.Parameter, gradient: Callable[[], Tensor]) -> None:
        """Remember to add `gradient()` to the gradient of `weight`."""

        @torch.no_grad()
        def add() -> None:
            fresh = gradient()
            weight.grad = fresh if weight.grad is None else weight.grad.add_(fresh)

        self.work.append(add)

    def take(self) -> list[Callable[[], None]]:
        """Everything put off since the last call, oldest first."""
        taken, self.work = self.work, []
        return taken
