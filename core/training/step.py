"""One optimizer step over the microbatches of a global batch."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from core.config.architecture import ExpertBias
from core.errors import ZooError
from core.moe.balance import Load, moved_bias
from core.moe.layer import MoELayer
from core.optim.chained import ChainedOptimizer
from core.parallel.collectives import all_reduce_sum
from core.parallel.groups import Groups
from core.training.batch import TokenBatch
from core.transformer.block import Block
from core.transformer.context import BalanceInputs, Totals
from core.transformer.stage import Losses, Stage


class NotFiniteError(ZooError):
    """The loss or the gradient is not a finite number; nothing was updated."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did, over the whole world.

    loss: mean cross-entropy per predicted token, nats. ahead: the same per multi-token module. balance: by `layer/loss`,
    coefficients applied. expert_counts: choices per expert by layer. tokens: of the global batch.
    """

    loss: float
    ahead: tuple[float, ...]
    balance: dict[str, float]
    gradient_norm: float
    expert_counts: dict[str, list[int]]
    tokens: int
    seconds: dict[str, float]


@dataclass(kw_only=True)
class _Sums:
    """What the microbatches of a step add up to on this rank, and the loads of the whole world so far."""

    device: torch.device
    losses: Tensor
    balance: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)
    loads: dict[str, Load] = field(default_factory=dict)

    def add(self, losses: Losses) -> None:
        self.losses += torch.stack([losses.tokens, *losses.ahead]).to(self.losses)
        for name, share in losses.balance.items():
            self.balance[name] = self.balance.get(name, 0.0) + share
        for layer, routing in losses.routings.items():
            self.counts[layer] = self.counts.get(layer, 0) + routing.counts_E
            if routing.balance is not None and routing.balance.load is not None:
                self.loads[layer] = routing.balance.load


@dataclass(kw_only=True)
class Clock:
    """Seconds by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def train_step(
    model: Stage, optimizer: ChainedOptimizer, batches: Sequence[TokenBatch], *, rate: float, groups: Groups
) -> StepResult:
    """Forward and backward over `batches` (this rank's microbatches), one update at learning rate `rate`, one bias move.

    Raises NotFiniteError before the update where the loss or the gradient norm is not a number.
    """
    clock = Clock()
    with clock.phase("counts"):
        totals = global_totals(model, batches, groups)
    sums = _Sums(device=model.place.device, losses=torch.zeros(1 + len(totals.ahead), dtype=torch.float64))
    for batch in batches:
        balance = BalanceInputs(totals=totals, seen=dict(sums.loads), tokens=groups.tokens)
        with clock.phase("forward"):
            losses = model.losses(batch.tokens, batch.labels, batch.packing, balance)
        with clock.phase("backward"):
            losses.total.backward()
            optimizer.accumulate()
        sums.add(losses)
    with clock.phase("reduce"):
        optimizer.reduce()
        losses_sum, balance_sum, counts = _reduced(sums, groups)
        norm = optimizer.gradient_norm()
    if not (math.isfinite(norm) and all(math.isfinite(loss) for loss in losses_sum)):
        raise NotFiniteError(_not_finite_message(losses_sum, norm, optimizer.steps))
    with clock.phase("optimizer"):
        optimizer.step(rate, norm)
        move_biases(model, counts)
    return StepResult(
        loss=losses_sum[0] / max(1, totals.labels),
        ahead=tuple(loss / max(1, n) for loss, n in zip(losses_sum[1:], totals.ahead, strict=True)),
        balance=balance_sum,
        gradient_norm=norm,
        expert_counts={layer: [int(count) for count in row.tolist()] for layer, row in counts.items()},
        tokens=totals.tokens,
        seconds=clock.seconds,
    )


def global_totals(model: Stage, batches: Sequence[TokenBatch], groups: Groups) -> Totals:
    """The counts of the whole global batch, by which every loss is divided once; one small all-reduce."""
    mine = [model.totals_of(batch.labels, batch.packing) for batch in batches]
    rows = [[t.tokens, t.labels, *t.ahead] for t in mine]
    summed = all_reduce_sum(torch.tensor(rows, dtype=torch.int64, device=model.place.device).sum(0), groups.tokens)
    tokens, labels, *ahead = summed.tolist()
    return Totals(tokens=tokens, labels=labels, ahead=tuple(ahead))


@torch.no_grad()
def move_biases(model: Stage, counts: Mapping[str, Tensor]) -> None:
    """Move every expert bias once, by the choices of the whole global batch: counts [E] by layer, equal on every rank."""
    for module in model.modules():
        if not (isinstance(module, Block) and isinstance(module.mlp, MoELayer)):
            continue
        router = module.mlp.router
        for balance in router.config.router.balance:
            if isinstance(balance, ExpertBias) and router.bias is not None:
                router.bias.copy_(moved_bias(router.bias, counts[module.path].to(router.bias.device), balance.rate))


def _reduced(sums: _Sums, groups: Groups) -> tuple[list[float], dict[str, float], dict[str, Tensor]]:
    """Losses, balance losses and choices per expert, summed over all ranks that share the batch; one all-reduce.

    Layers may differ in their number of experts, so everything travels as one flat row.
    """
    parts = [sums.losses, torch.tensor([float(value) for value in sums.balance.values()], dtype=torch.float64)]
    parts += [counts.to("cpu", torch.float64) for counts in sums.counts.values()]
    summed = all_reduce_sum(torch.cat(parts).to(sums.device), groups.tokens).cpu()
    losses, balance, *counts = summed.split([part.numel() for part in parts])
    return (
        losses.tolist(),
        dict(zip(sums.balance, balance.tolist(), strict=True)),
        dict(zip(sums.counts, counts, strict=True)),
    )


def _not_finite_message(losses: list[float], norm: float, step: int) -> str:
    shown = ", ".join(f"{loss:g}" for loss in losses)
    return (
        f"step {step + 1}: the loss (sum {shown}) or the gradient norm ({norm:g}) is not finite; nothing was updated. "
        "The last checkpoint, if there is one, is good. Resume it with a lower optimizer.learning_rate or a smaller optimizer.clip_norm."
    )
