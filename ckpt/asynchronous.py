"""Saves beside training, which stops for as little as can be: it goes on while copies are taken, and waits for them only before it
changes what is copied; then the copies are written while it goes on."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Thread
from types import TracebackType
from typing import Any, Self

from ckpt.agree import each, together
from ckpt.files.protocol import Address
from ckpt.plan import Held
from ckpt.save import Planned, Saving, agree, carry_out, checked, describe
from ckpt.staging import Staging
from core.errors import CheckpointError
from core.parallel.groups import Group
from core.state.sharded import ShardedTensor
from core.training.metrics import SaveMetrics

Tensors = tuple[ShardedTensor, ...]


@dataclass(frozen=True, kw_only=True)
class _Agreed:
    """The plan of all saves for as long as every rank holds what it held then; `held` is what this one did."""

    held: tuple[Held, ...]
    planned: Planned
    staging: Staging


@dataclass(eq=False, kw_only=True)
class _UnderWay:
    """A save in the background. copied: set when training may change the tensors."""

    step: int
    bytes: int
    begin: float
    copied: Event = field(default_factory=Event)
    thread: Thread | None = None
    stalled_seconds: float = 0.0
    seconds: float = 0.0
    error: CheckpointError | None = None

    @property
    def metrics(self) -> SaveMetrics:
        """What was measured."""
        return SaveMetrics(step=self.step, seconds=self.seconds, stalled_seconds=self.stalled_seconds, bytes=self.bytes)


class AsynchronousSaver:
    """Saves the checkpoints of the run at `run`, one at a time, in a thread of its own that communicates over `world` alone.

    What is saved are the values at the time of `save`, if nothing changes them before `before_update` has returned. A context: leaving it
    waits for the save under way. Needs host memory for what this rank writes of a checkpoint, and keeps it.

    Collective over `world`: every rank calls `prepare` and `save` at the same points. `world` must be used by nothing else meanwhile
    (`Groups.checkpoint`). A save that fails on one rank fails on all; `failed`, `poll`, `wait` or the next `save` tell, and the checkpoints
    from before are as they were.
    """

    def __init__(self, run: Address, world: Group, saving: Saving) -> None:
        self.run = run
        self.world = world
        self.saving = saving
        self._agreed: _Agreed | None = None
        self._under_way: _UnderWay | None = None
        self._finished: list[SaveMetrics] = []

    def prepare(self, tensors: Iterable[ShardedTensor]) -> None:
        """Plan the saves of `tensors` and fetch the memory for their copies in the background, so that the first save need not.

        Raises CheckpointError where they cannot be saved.
        """
        self.wait()
        staging = self._agree(0, tuple(tensors), {}).staging

        def fetch() -> None:
            # Memory that is not there is reported by the save that needs it.
            with suppress(Exception):
                staging.allocate()

        Thread(target=fetch, name="checkpoint memory", daemon=True).start()

    def save(self, step: int, tensors: Iterable[ShardedTensor], extra: Mapping[str, Any]) -> None:
        """Begin the checkpoint of `step`; first wait for the one under way. Arguments as for `ckpt.save.save`.

        Parameters must be complete (`Optimizer.wait_all`). Raises CheckpointError, on every rank, for tensors that cannot be saved, or
        where the last save has failed.
        """
        begin = time.perf_counter()
        self.wait()
        mine = tuple(tensors)
        agreed = self._agree(step, mine, extra)
        agreed.staging.follow()
        save = _UnderWay(step=step, bytes=agreed.planned.plan.bytes, begin=begin)
        arguments = (save, agreed, mine, copy.deepcopy(extra))
        # Not a daemon: a process that ends without `wait` ends after the save, not in the middle of it.
        save.thread = Thread(target=self._carry_out, args=arguments, name=f"checkpoint {step}")
        save.thread.start()
        self._under_way = save
        save.stalled_seconds = time.perf_counter() - begin

    def before_update(self) -> None:
        """Return when the tensors of the last `save` may be changed; waits for no other rank."""
        save = self._under_way
        if save is not None:
            begin = time.perf_counter()
            save.copied.wait()
            save.stalled_seconds += time.perf_counter() - begin

    @property
    def failed(self) -> bool:
        """Whether the save under way has failed, as far as this rank knows; `wait` then raises on every rank."""
        return self._under_way is not None and self._under_way.error is not None

    def poll(self) -> None:
        """Raise CheckpointError if the last save is over and has failed. Ranks may come to know it a moment after each other."""
        if self._under_way is not None and not _runs(self._under_way):
            self.wait()

    def wait(self) -> None:
        """Return when no save is under way. Raises CheckpointError if it failed, on every rank, naming rank and file."""
        save = self._under_way
        if save is None:
            return
        assert save.thread is not None
        save.thread.join()
        self._under_way = None
        if save.error is not None:
            raise save.error
        self._finished.append(save.metrics)

    def finished(self) -> tuple[SaveMetrics, ...]:
        """The saves that were completed since the last call, in order."""
        if self._under_way is not None and not self.failed:
            self.poll()
        taken = tuple(self._finished)
        self._finished.clear()
        return taken

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except CheckpointError as failure:
            if error is None:
                raise
            # What ended training is what counts, but a checkpoint that is not there must be known too.
            error.add_note(str(failure))

    def _agree(self, step: int, tensors: Tensors, extra: Mapping[str, Any]) -> _Agreed:
        """The plan, which all ranks make together, unless they all hold what they held when they last did."""
        before = self._agreed
        if before is not None and all(together(self.world, partial(self._holds_still, before, step, tensors, extra))):
            return before
        # Two buffers are never held at once.
        self._agreed = before = None
        planned = agree(step, tensors, extra, self.world, self.saving)
        mine = [write for file in planned.files if file.rank == self.world.position for write in file.writes]
        self._agreed = _Agreed(held=describe(tensors), planned=planned, staging=Staging(mine, tensors))
        return self._agreed

    def _holds_still(self, agreed: _Agreed, step: int, tensors: Tensors, extra: Mapping[str, Any]) -> bool:
        """Whether this rank holds what it held when the plan was made."""
        return checked(tensors, extra, step, self.saving) == agreed.held

    def _carry_out(self, save: _UnderWay, agreed: _Agreed, tensors: Tensors, extra: Mapping[str, Any]) -> None:
        """What the thread does."""
        try:
            # Before anything that waits for other ranks, since training may wait for it.
            copies = _outcome(lambda: agreed.staging.fill(tensors))
            save.copied.set()
            staged = self._copied_everywhere(copies, save.step)
            carry_out(self.run, save.step, agreed.planned, staged, extra, self.world, self.saving.keep)
            save.seconds = time.perf_counter() - save.begin
        except CheckpointError as error:
            save.error = error
        except BaseException as error:
            text = (
                f"{self.run}: the checkpoint of step {save.step} could not be written: the ranks have lost each other"
            )
            save.error = CheckpointError(f"{text} ({type(error).__name__}: {error})")
            save.error.__cause__ = error

    def _copied_everywhere(self, copies: Future[Tensors], step: int) -> Tensors:
        """This rank's copies, if every rank has its own."""
        try:
            return each(self.world, copies.result)
        except CheckpointError as error:
            text = (
                f"{self.run}: the checkpoint of step {step} could not be copied to host memory, so it was not written;"
            )
            raise CheckpointError(f"{text} the checkpoints from before are untouched.\n{error}") from error


class SynchronousSaver:
    """What AsynchronousSaver is, but training stops until a checkpoint is on the disk: no memory for copies is needed."""

    def __init__(self, run: Address, world: Group, saving: Saving) -> None:
        self.run = run
        self.world = world
        self.saving = saving
        self.failed = False
        self._finished: list[SaveMetrics] = []

    def prepare(self, tensors: Iterable[ShardedTensor]) -> None:
        """Nothing."""

    def save(self, step: int, tensors: Iterable[ShardedTensor], extra: Mapping[str, Any]) -> None:
        """Make the checkpoint of `step`; as `ckpt.save.save`."""
        begin, mine = time.perf_counter(), tuple(tensors)
        planned = agree(step, mine, extra, self.world, self.saving)
        carry_out(self.run, step, planned, mine, extra, self.world, self.saving.keep)
        seconds = time.perf_counter() - begin
        self._finished.append(
            SaveMetrics(step=step, seconds=seconds, stalled_seconds=seconds, bytes=planned.plan.bytes)
        )

    def before_update(self) -> None:
        """Nothing."""

    def wait(self) -> None:
        """Nothing: no save is ever under way."""

    def finished(self) -> tuple[SaveMetrics, ...]:
        """The saves that were completed since the last call, in order."""
        taken = tuple(self._finished)
        self._finished.clear()
        return taken

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing."""


def _runs(save: _UnderWay) -> bool:
    return save.thread is not None and save.thread.is_alive()


def _outcome(action: Callable[[], Tensors]) -> Future[Tensors]:
    """What `action` returned or raised, to be had from `result`."""
    outcome: Future[Tensors] = Future()
    try:
        outcome.set_result(action())
    except Exception as error:
        outcome.set_exception(error)
    return outcome
