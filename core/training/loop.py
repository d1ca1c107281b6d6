"""The training loop: steps, validation, checkpoints, stopping. What it saves and records to is handed in."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from core.config.flops import flops_per_token
from core.config.run import RunConfig
from core.data.loader import Loader
from core.moe.replay import moe_layers
from core.moe.workload import Workload
from core.optim.protocol import Optimizer
from core.optim.scaler import LossScaler
from core.optim.schedules import learning_rate
from core.parallel.collectives import all_reduce_sum
from core.parallel.groups import Groups
from core.training.batch import to_device
from core.training.evaluate import validation_loss
from core.training.metrics import StepMetrics
from core.training.rounding import watching
from core.training.step import StepResult, train_step
from core.transformer.context import BatchPosition, TokenBatch
from core.transformer.stage import Stage


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What the loop calls.

    save(step, tokens) makes a checkpoint, or begins one: nothing that it has is changed until before_update(), which the next step calls
    before its update, has returned. failed() says whether one that was begun has failed, as far as this rank knows; finish() waits
    until none is under way and raises what has failed. record(metrics) is called on every rank after every step, stop() says whether this
    rank was asked to end.
    """

    save: Callable[[int, int], None]
    record: Callable[[StepMetrics], None]
    stop: Callable[[], bool]
    before_update: Callable[[], None] = lambda: None
    failed: Callable[[], bool] = lambda: False
    finish: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come: optimizer steps done, and tokens trained on."""

    step: int
    tokens: int


class Trainer:
    """One rank's side of a run."""

    def __init__(
        self,
        run: RunConfig,
        model: Stage,
        optimizer: Optimizer,
        groups: Groups,
        *,
        train: Loader,
        validation: Loader,
        matmul_rate: float,
        scaler: LossScaler | None = None,
    ) -> None:
        self.run = run
        self.model = model
        self.optimizer = optimizer
        self.groups = groups
        self.train = train
        self.validation = validation
        self.matmul_rate = matmul_rate
        self.scaler = scaler

    def go(self, start: Progress, hooks: Hooks) -> Progress:
        """Train from `start` to train.steps, or until any rank is asked to stop; the last step is saved when this returns how far.

        Raises what the hooks raise. A checkpoint that fails in the background ends the run on every rank after the same step.
        """
        now, saved, config = start, start.step, self.run.train
        saving: float | None = None
        while now.step < config.steps and not self._ends(hooks):
            metrics = self._step(now, hooks, saving)
            now, saving = Progress(step=metrics.step, tokens=metrics.tokens), None
            hooks.record(metrics)
            if now.step % self.run.checkpoint.interval == 0:
                begin = time.perf_counter()
                hooks.save(now.step, now.tokens)
                saved, saving = now.step, time.perf_counter() - begin
        if now.step != saved:
            hooks.save(now.step, now.tokens)
        hooks.finish()
        return now

    def validate(self) -> float:
        """The loss on the fixed validation windows, nats per token."""
        batches = [to_device(b, self.model) for b in self.validation.validation(self.run.train.eval_sequences)]
        return validation_loss(self.model, batches, self.groups)

    def _step(self, before: Progress, hooks: Hooks, saving: float | None) -> StepMetrics:
        """One step from reading to metrics; validation, where it is due, is not part of its time.

        saving: the seconds that the call of `save` behind the last step took; None where there was none.
        """
        config = self.run.train
        begin = time.perf_counter()
        batches = self._read(before.step)
        read = time.perf_counter()
        schedule = config.schedule_steps or config.steps
        rate = learning_rate(self.run.optimizer, before.step, schedule)
        before_update = None if saving is None else hooks.before_update
        with watching(self.model, self.run, before.step + 1) as watch:
            result = train_step(
                self.model,
                self.optimizer,
                batches,
                rate=rate,
                groups=self.groups,
                before_update=before_update,
                scaler=self.scaler,
            )
        rounding = {} if watch is None else watch.insight(self.groups)
        seconds = time.perf_counter() - begin
        step = before.step + 1
        due = step % config.eval_interval == 0 or step == config.steps
        validation = self.validate() if due else None
        phases = {"data": read - begin, **result.seconds}
        if saving is not None:
            phases["checkpoint"] += saving
        if validation is not None:
            phases["validation"] = time.perf_counter() - begin - seconds
        metrics = self._metrics(step, before.tokens, result, rate, seconds, phases, validation)
        return replace(metrics, precision=rounding)

    def _read(self, step: int) -> list[TokenBatch]:
        """My microbatches of a step, which know what their random numbers hang on, and their experts where routing is forced."""
        config, found = self.run.train, []
        for microbatch in self.train.batches(step):
            position = BatchPosition(seed=config.seed, step=step, first=microbatch.first)
            forced = None
            if config.forced_routing is not None:
                forced = Workload(
                    name=config.forced_routing,
                    seed=position.seed,
                    step=step,
                    first=position.first,
                    layers=moe_layers(self.run.model),
                    ep=self.groups.ep.size,
                )
            found.append(replace(to_device(microbatch, self.model), position=position, prescribed=forced))
        return found

    def _metrics(
        self,
        step: int,
        tokens_before: int,
        result: StepResult,
        rate: float,
        seconds: float,
        phases: Mapping[str, float],
        validation: float | None,
    ) -> StepMetrics:
        work = flops_per_token(self.run.model, self.run.train.sequence_tokens) * result.tokens
        load = {layer: _shares(counts) for layer, counts in result.expert_counts.items()}
        return StepMetrics(
            step=step,
            loss=result.loss,
            learning_rate=rate,
            grad_norm=result.gradient_norm,
            loss_scale=result.loss_scale,
            skipped=None if self.scaler is None else self.scaler.skipped,
            tokens_per_second=result.tokens / seconds,
            tokens=tokens_before + result.tokens,
            mfu=work / seconds / self.matmul_rate,
            worst_load=max((max(shares) * len(shares) for shares in load.values()), default=None),
            expert_load=load,
            insight=result.insight,
            mtp_loss=sum(result.ahead) / len(result.ahead) if result.ahead else None,
            aux_loss=sum(result.balance.values()) if result.balance else None,
            seconds=phases,
            validation_loss=validation,
        )

    def _ends(self, hooks: Hooks) -> bool:
        """Whether any rank was asked to stop, the same answer on all: they must leave the loop at the same step.

        Raises, on all, where any rank knows of a checkpoint that has failed: the others come to know it by waiting for theirs.
        """
        mine = torch.tensor([float(hooks.stop()), float(hooks.failed())], device=self.model.place.device)
        stop, failed = all_reduce_sum(mine, self.groups.world).tolist()
        if failed:
            hooks.finish()
        return stop > 0


def _shares(counts: list[int]) -> tuple[float, ...]:
    total = max(1, sum(counts))
    return tuple(count / total for count in counts)
