"""The parts of one pipeline rank over the microbatches of a batch: what the pipeline's runtime calls, and what it adds up to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from core.moe.balance import Load
from core.moe.router import Routing
from core.pipeline.runtime import Pipeline, execute
from core.pipeline.schedule import forward_only, make_schedule
from core.training.clock import Clock
from core.training.replay import Recording
from core.transformer.context import BalanceInputs, TokenBatch, Totals
from core.transformer.stage import PartOutput, Purpose, Stage


@dataclass(kw_only=True)
class Sums:
    """What the microbatches of a batch add up to on this rank, and the loads of the whole world so far.

    losses: [1 + modules ahead] float64, summed cross-entropy over my tokens. balance: by `layer/loss`. counts: choices per expert
    by layer. quantiles: by layer, as `BalanceLosses` has them. told: by layer, choices that found no room and squares of logits, [2]
    float64. largest: by layer, the largest logit. hidden: what the last part made of the latest microbatch, where no loss was
    asked for.
    """

    losses: Tensor
    balance: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)
    loads: dict[str, Load] = field(default_factory=dict)
    quantiles: dict[str, Tensor] = field(default_factory=dict)
    told: dict[str, Tensor] = field(default_factory=dict)
    largest: dict[str, Tensor] = field(default_factory=dict)
    hidden: Tensor | None = None

    def add(self, made: PartOutput) -> None:
        """Add one part's results on one microbatch."""
        if made.tokens is None:
            self.hidden = made.out
        else:
            mine = torch.stack([made.tokens, *made.ahead]).to(self.losses)
            self.losses[: mine.numel()] += mine
        for name, share in made.balance.items():
            self.balance[name] = self.balance.get(name, 0.0) + share
        for layer, routing in made.routings.items():
            self.counts[layer] = self.counts.get(layer, 0) + routing.counts_E
            if routing.balance is not None and routing.balance.load is not None:
                self.loads[layer] = routing.balance.load
            if routing.balance is not None and routing.balance.quantiles is not None:
                self.quantiles[layer] = self.quantiles.get(layer, 0) + routing.balance.quantiles
            self._tell(layer, routing)

    def _tell(self, layer: str, routing: Routing) -> None:
        """Add what is worth telling of one layer in one microbatch."""
        moved = routing.moved
        assert routing.logit_size is not None and moved is not None, (
            "layers tell how large logits are, and what became of rows"
        )
        squares, largest = routing.logit_size.to(torch.float64)
        told = torch.stack([moved.dropped.to(squares), moved.saved.to(squares), squares])
        self.told[layer] = self.told[layer] + told if layer in self.told else told
        self.largest[layer] = torch.maximum(self.largest[layer], largest) if layer in self.largest else largest


@dataclass(kw_only=True)
class StageWork:
    """The `PartWork` of a stage. totals are given in training; `after` is called when gradients have come; a recording is filled.

    loss_scale: what is differentiated is so many times the loss.
    """

    model: Stage
    batches: Sequence[TokenBatch]
    purpose: Purpose
    sums: Sums
    totals: Totals | None = None
    after: Callable[[], None] | None = None
    recording: Recording | None = None
    loss_scale: float = 1.0
    clock: Clock = field(default_factory=Clock)

    def forward(self, chunk: int, microbatch: int, received: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Run a part and add up what it tells."""
        balance = None
        if self.totals is not None:
            groups = self.model.place.groups
            # A copy: a forward that is repeated for the backward must see what the first one saw, not its own load added.
            seen = dict(self.sums.loads)
            balance = BalanceInputs(totals=self.totals, seen=seen, sequence=groups.sequence, tokens=groups.tokens)
        with self.clock.phase("forward"):
            made = self.model.run(chunk, received, self.batches[microbatch], purpose=self.purpose, balance=balance)
        self.sums.add(made)
        if self.recording is not None:
            self.recording.add(microbatch, made.routings)
        if made.share is None or self.loss_scale == 1.0:
            return made.out, made.share
        return made.out, made.share * self.loss_scale

    def received_shape(self, chunk: int, microbatch: int) -> tuple[int, ...]:
        """The shape of what a part receives."""
        return self.model.received_shape(chunk, self.batches[microbatch], self.purpose)

    def putting_off(self, backward: Callable[[], None]) -> list[Callable[[], None]]:
        """Run `backward`; the products' weight gradients are what is left."""
        later = self.model.place.later
        assert later is not None, "this schedule needs a model whose products can put off their weight gradients"
        later.collecting = True
        try:
            backward()
        finally:
            later.collecting = False
        return later.take()

    def after_backward(self) -> None:
        """Hand new gradients on."""
        if self.after is not None:
            self.after()


def train_microbatches(
    model: Stage,
    batches: Sequence[TokenBatch],
    totals: Totals,
    *,
    after: Callable[[], None],
    clock: Clock,
    recording: Recording | None = None,
    loss_scale: float = 1.0,
) -> Sums:
    """Forward and backward of all microbatches through this rank's parts, in the order of the mapping's schedule.

    `after` is called whenever gradients have come; they are `loss_scale` times those of the loss. What is not forward counts as backward, waiting for other stages too.
    """
    work = StageWork(
        model=model,
        batches=batches,
        purpose="training",
        sums=_sums(model, len(totals.ahead)),
        totals=totals,
        after=after,
        recording=recording,
        loss_scale=loss_scale,
        clock=clock,
    )
    pp, name = model.place.groups.pp, model.place.parallel.schedule
    schedule = make_schedule(name, stages=pp.size, virtual=len(model.parts), microbatches=len(batches))
    start, forward = time.perf_counter(), clock.seconds.get("forward", 0.0)
    execute(schedule.ranks[pp.position], work, _pipeline(model))
    forward = clock.seconds["forward"] - forward
    clock.add("backward", time.perf_counter() - start - forward)
    return work.sums


@torch.no_grad()
def run_microbatches(
    model: Stage, batches: Sequence[TokenBatch], purpose: Purpose, recording: Recording | None = None
) -> Sums:
    """Forward alone of all microbatches."""
    work = StageWork(model=model, batches=batches, purpose=purpose, sums=_sums(model, 0), recording=recording)
    pp = model.place.groups.pp
    schedule = forward_only(stages=pp.size, virtual=len(model.parts), microbatches=len(batches))
    execute(schedule.ranks[pp.position], work, _pipeline(model))
    return work.sums


def _sums(model: Stage, ahead: int) -> Sums:
    return Sums(losses=torch.zeros(1 + ahead, dtype=torch.float64, device=model.place.device))


def _pipeline(model: Stage) -> Pipeline:
    place = model.place
    return Pipeline(
        pp=place.groups.pp,
        pipes=place.groups.pipes,
        virtual=len(model.parts),
        dtype=place.dtype,
        device=place.device,
    )
