"""Where and in which form modules are built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from core.config.mapping import ParallelConfig
from core.config.memory import MemoryConfig, RecomputeName
from core.kernels.deferred import Deferred
from core.memory.recompute import discard
from core.parallel.collectives import all_gather_rows, reduce_scatter_rows
from core.parallel.groups import Groups
from core.precision.linear import Once, quantised_linear
from core.precision.matmul import deferring_linear, linear
from core.precision.quantiser import Quantiser

T = TypeVar("T")


@dataclass(kw_only=True)
class Shared:
    """What all modules of a place use together, each thing made by the first that asks for it."""

    made: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """The thing of this name."""
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]


@dataclass(frozen=True, kw_only=True)
class Place:
    """This rank's groups, the mapping they follow, the dtype of parameters and the device that holds them.

    later: where products put off their weight gradients, under a schedule that computes them apart. shared: communication buffers.
    memory: what modules make again in the backward instead of keeping it. dispatcher_sms: processors of a GPU that the kernels of a
    dispatcher's package take (None: its own choice).
    """

    groups: Groups
    parallel: ParallelConfig
    dtype: torch.dtype
    device: torch.device
    later: Deferred | None = None
    shared: Shared = field(default_factory=Shared, compare=False)
    memory: MemoryConfig = MemoryConfig()
    dispatcher_sms: int | None = None

    def again(self, name: RecomputeName) -> bool:
        """Whether this is made again in the backward."""
        return name in self.memory.recompute

    def inside(self, name: RecomputeName) -> Place:
        """The place of modules inside a part of this name: where that is made again as a whole, nothing of it is on its own."""
        return replace(self, memory=replace(self.memory, recompute=())) if self.again(name) else self

    def empty(self, *shape: int) -> Tensor:
        """An uninitialised tensor of this place."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def product(
        self, x_TK: Tensor, weight: nn.Parameter, quantiser: Quantiser | None = None, once: Once | None = None
    ) -> Tensor:
        """x times the rows of a parameter of [N, K] or [2, N / 2, K]: [T, N]; by a recipe where the weight has one.

        once: what several weights of one x share.
        """
        if quantiser is not None:
            return quantised_linear(x_TK, weight, quantiser, self.later, once)
        if self.later is not None:
            return deferring_linear(x_TK, weight, self.later)
        return linear(x_TK, weight if weight.dim() == 2 else weight.flatten(0, 1))

    def gather_sequence(self, x_TH: Tensor, rows: tuple[int, ...]) -> Tensor:
        """What all ranks of tp hold between the layers, rows[p] tokens of rank p: [sum(rows), H]. One all-gather."""
        return all_gather_rows(x_TH, rows, self.groups.tp)

    def with_sequence(self, x_TH: Tensor, rows: tuple[int, ...], consumer: Callable[[Tensor], T]) -> T:
        """`consumer` of what `gather_sequence` gives for the output of a norm.

        Under tp what is gathered lies beside the norm's output. Where that is not kept, this is not either: one more all-gather in the
        backward.
        """
        if self.groups.tp.size == 1 or not self.again("layernorm"):
            return consumer(self.gather_sequence(x_TH, rows))
        return discard(lambda mine: (self.gather_sequence(mine, rows),), (x_TH,), consumer)

    def scatter_sequence(self, partial_TH: Tensor, rows: tuple[int, ...]) -> Tensor:
        """My tokens of the sum over tp of every rank's part: [rows[mine], H]. One reduce-scatter."""
        return reduce_scatter_rows(partial_TH, rows, self.groups.tp)
