"""One optimizer step over the microbatches of a global batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from core.config.architecture import ExpertBias, ModelConfig, MoE, QuantileBias
from core.errors import ZooError
from core.moe.balance import loss_names, moved_bias, moved_thresholds
from core.moe.layer import MoELayer
from core.optim.protocol import Optimizer
from core.optim.scaler import LossScaler
from core.parallel.collectives import all_reduce_max, all_reduce_sum
from core.parallel.groups import Groups
from core.precision.history import forget, remember
from core.training.clock import Clock
from core.training.insight import LayerInsight, insight_of
from core.training.replay import Recording
from core.training.work import Sums, train_microbatches
from core.transformer.block import Block
from core.transformer.context import TokenBatch, Totals
from core.transformer.quantise import histories
from core.transformer.stage import Stage


class NotFiniteError(ZooError):
    """The loss or the gradient is not a finite number; nothing was updated."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did, over the whole world.

    loss: mean cross-entropy per predicted token, nats. ahead: the same per multi-token module. balance: by `layer/loss`,
    coefficients applied. expert_counts: choices per expert by layer, of what is routed. insight: by layer. tokens: of the global batch.
    loss_scale: of this step, where there is a scaler. skipped: the gradient overflowed, and nothing was updated.
    """

    loss: float
    ahead: tuple[float, ...]
    balance: dict[str, float]
    gradient_norm: float
    expert_counts: dict[str, list[int]]
    insight: dict[str, LayerInsight]
    tokens: int
    seconds: dict[str, float]
    loss_scale: float | None = None
    skipped: bool = False


def train_step(
    model: Stage,
    optimizer: Optimizer,
    batches: Sequence[TokenBatch],
    *,
    rate: float,
    groups: Groups,
    before_update: Callable[[], None] | None = None,
    recording: Recording | None = None,
    scaler: LossScaler | None = None,
) -> StepResult:
    """Forward and backward over `batches` (this rank's microbatches), one update at learning rate `rate`, one bias move.

    before_update: called when all gradients are there; until it returns, nothing that a checkpoint has is changed. The time that it
    takes is the phase `checkpoint`. recording: is told what the routers choose. scaler: multiplies the loss that is differentiated; the
    gradient is divided again by the update. A step whose gradient overflows under it moves no parameter, moment or bias.
    Raises NotFiniteError before the update where the loss is not a number, or the gradient norm without a scaler.
    """
    clock = Clock()
    # From now on the model waits, module by module, for the parameters that the last update still sends round.
    model.wait_for = optimizer.wait_for
    with clock.phase("counts"):
        totals = global_totals(model, batches, groups)
    optimizer.begin(model.passes(len(batches)))
    scale, done = (1.0, optimizer.steps) if scaler is None else (scaler.scale, optimizer.steps + scaler.skipped)
    sums = train_microbatches(
        model,
        batches,
        totals,
        after=optimizer.accumulate,
        clock=clock,
        recording=recording,
        loss_scale=scale,
    )
    with clock.phase("reduce"):
        optimizer.reduce()
        reduced = _reduced(model, sums, groups)
        norm = optimizer.gradient_norm() / scale
    overflow = not math.isfinite(norm)
    if overflow:
        forget(histories(model))
    if (overflow and scaler is None) or not all(math.isfinite(loss) for loss in reduced.losses):
        raise NotFiniteError(_not_finite_message(reduced.losses, norm, done))
    if before_update is not None:
        with clock.phase("checkpoint"):
            before_update()
    with clock.phase("optimizer"):
        # First: weights that are held in low precision are rounded in the update, by what the steps so far have seen.
        remember(histories(model), groups)
        if not overflow:
            optimizer.step(rate, norm, scale)
            move_biases(model, reduced.counts, reduced.quantiles)
        if scaler is not None:
            scaler.note(done + 1, overflow=overflow)
    told = _told(reduced, totals, norm, groups.ep.size)
    return replace(told, seconds=clock.seconds, loss_scale=None if scaler is None else scale, skipped=overflow)


def _told(reduced: _Reduced, totals: Totals, norm: float, ep: int) -> StepResult:
    """A step in numbers, but for its time and its scaler."""
    expert_counts = {layer: [int(count) for count in row.tolist()] for layer, row in reduced.counts.items()}
    first, *ahead = reduced.losses
    return StepResult(
        loss=first / max(1, totals.labels),
        ahead=tuple(loss / max(1, n) for loss, n in zip(ahead, totals.ahead, strict=True)),
        balance=reduced.balance,
        gradient_norm=norm,
        expert_counts=expert_counts,
        insight=_insight(reduced, expert_counts, totals.tokens, ep),
        tokens=totals.tokens,
        seconds={},
    )


def global_totals(model: Stage, batches: Sequence[TokenBatch], groups: Groups) -> Totals:
    """The counts of the whole global batch, by which every loss is divided once; one small all-reduce over dp.

    The ranks of tp, cp and pp have read the same microbatches.
    """
    mine = [model.totals_of(batch) for batch in batches]
    rows = [[t.tokens, t.labels, *t.ahead] for t in mine]
    summed = all_reduce_sum(torch.tensor(rows, dtype=torch.int64, device=model.place.device).sum(0), groups.dp)
    tokens, labels, *ahead = summed.tolist()
    return Totals(tokens=tokens, labels=labels, ahead=tuple(ahead))


@torch.no_grad()
def move_biases(model: Stage, counts: Mapping[str, Tensor], quantiles: Mapping[str, Tensor]) -> None:
    """Move every expert bias once, by the choices of the whole global batch: counts [E] by layer, equal on every rank.

    quantiles: [E + 1] by layer, as `BalanceLosses` has them, where thresholds balance.
    """
    for module in model.modules():
        if not (isinstance(module, Block) and isinstance(module.mlp, MoELayer)):
            continue
        router = module.mlp.router
        for balance in router.config.router.balance:
            if router.bias is None:
                continue
            if isinstance(balance, ExpertBias):
                router.bias.copy_(moved_bias(router.bias, counts[module.path].to(router.bias.device), balance.rate))
            elif isinstance(balance, QuantileBias):
                of_layer = quantiles[module.path].to(router.bias.device)
                router.bias.copy_(moved_thresholds(router.bias, of_layer, balance.ema))


@dataclass(frozen=True, kw_only=True)
class _Reduced:
    """The sums of the whole world: as those of `Sums`, for all layers."""

    losses: list[float]
    balance: dict[str, float]
    counts: dict[str, Tensor]
    quantiles: dict[str, Tensor]
    told: dict[str, Tensor]
    largest: dict[str, float]


def _reduced(model: Stage, sums: Sums, groups: Groups) -> _Reduced:
    """What the ranks' microbatches add up to; one all-reduce for the sums, and a small one for the largest logits.

    Every rank lays down the same row, whatever parts of the model it holds: zeros for the others' layers.
    """
    zero = torch.zeros((), dtype=torch.float64)
    names, experts, thresholds = _slots(model.config)
    parts = [
        sums.losses.cpu(),
        torch.tensor([float(sums.balance.get(name, zero)) for name in names], dtype=torch.float64),
    ]
    parts += [sums.counts.get(layer, zero.expand(n)).to("cpu", torch.float64) for layer, n in experts.items()]
    parts += [sums.quantiles.get(layer, zero.expand(n + 1)).to("cpu", torch.float64) for layer, n in thresholds.items()]
    parts += [sums.told.get(layer, zero.expand(3)).to("cpu", torch.float64) for layer in experts]
    summed = all_reduce_sum(torch.cat(parts).to(model.place.device), groups.world).cpu()
    losses, balance, *rows = summed.split([part.numel() for part in parts])
    # Without MoE layers there is none to ask for.
    largest: list[float] = []
    if experts:
        none = zero.to(model.place.device)
        largest = all_reduce_max(torch.stack([sums.largest.get(x, none) for x in experts]), groups.world).tolist()
    first, behind = len(experts), len(experts) + len(thresholds)
    return _Reduced(
        losses=losses.tolist(),
        balance=dict(zip(names, balance.tolist(), strict=True)),
        counts=dict(zip(experts, rows[:first], strict=True)),
        quantiles=dict(zip(thresholds, rows[first:behind], strict=True)),
        told=dict(zip(experts, rows[behind:], strict=True)),
        largest=dict(zip(experts, largest, strict=True)),
    )


def _insight(reduced: _Reduced, counts: Mapping[str, list[int]], tokens: int, ep: int) -> dict[str, LayerInsight]:
    found = {}
    for layer, row in counts.items():
        told, largest = reduced.told[layer].tolist(), reduced.largest[layer]
        found[layer] = insight_of(row, told=told, largest=largest, tokens=tokens, ep=ep)
    return found


def _slots(model: ModelConfig) -> tuple[list[str], dict[str, int], dict[str, int]]:
    """The names of all balance losses of a model, and the numbers of experts of its MoE layers and of those that thresholds balance."""
    layers = {path: layer.mlp for path, layer in model.all_layers() if isinstance(layer.mlp, MoE)}
    names = [f"{path}/{name}" for path, moe in layers.items() for name in loss_names(moe.router)]
    experts = {path: moe.experts for path, moe in layers.items()}
    balances = {path: moe.router.balance for path, moe in layers.items()}
    thresholds = {path: n for path, n in experts.items() if any(isinstance(b, QuantileBias) for b in balances[path])}
    return names, experts, thresholds


def _not_finite_message(losses: list[float], norm: float, step: int) -> str:
    shown = ", ".join(f"{loss:g}" for loss in losses)
    return (
        f"step {step + 1}: the loss (sum {shown}) or the gradient norm ({norm:g}) is not finite; nothing was updated. "
        "The last checkpoint, if there is one, is good. Resume it with a lower optimizer.learning_rate or a smaller optimizer.clip_norm."
    )
