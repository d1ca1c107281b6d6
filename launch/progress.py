"""What a person sees while a run trains: one line a step, and on a terminal a bar with the time left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from core.training.metrics import SaveMetrics, StepMetrics

# Where the output is a file, about so many lines of a whole run are enough.
PLAIN_LINES = 100
# The time left follows the last steps, not the slow first ones.
REMEMBERED_STEPS = 20
# The bar is drawn by a thread of the process that trains: seldom enough to cost nothing.
REFRESHES_PER_SECOND = 2
HEADER = "  step     loss   learning rate   grad norm   tokens/s     MFU   worst load   left"


class ProgressLine:
    """Shows the steps of one run on `console`; a context that puts the terminal right again, whatever happens.

    steps: where the run stops. start_step: how far an earlier start came.
    """

    def __init__(self, *, steps: int, start_step: int = 0, console: Console | None = None) -> None:
        self._console = console or Console()
        self._total = steps
        self._every = 1 if self._console.is_terminal else max(1, (steps - start_step) // PLAIN_LINES)
        self._times = [time.monotonic()]
        self._save: SaveMetrics | None = None
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            refresh_per_second=REFRESHES_PER_SECOND,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID = self._bar.add_task("training", total=steps, completed=start_step, left="")

    def __enter__(self) -> Self:
        self._bar.start()
        self.say(HEADER)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, metrics: StepMetrics, saves: Sequence[SaveMetrics] = ()) -> None:
        """Show one step; where the output is no terminal, every few of them, and each with a validation loss.

        saves: the checkpoints that were completed since the last step; the newest stands behind the next line.
        """
        self._save = saves[-1] if saves else self._save
        self._times = [*self._times[-REMEMBERED_STEPS:], time.monotonic()]
        left = self._time_left(metrics.step)
        self._bar.update(self._task, completed=metrics.step, left=f"{left} left")
        measured = metrics.validation_loss is not None
        if measured or metrics.step % self._every == 0 or metrics.step in (1, self._total):
            self.say(step_line(metrics, left, self._save))
            self._save = None

    def show_last(self, saves: Sequence[SaveMetrics]) -> None:
        """Show the checkpoint that was completed after the last step."""
        if saves:
            self.say(f"checkpoint of step {saves[-1].step} written in {saves[-1].seconds:.2f} s")

    def say(self, text: str) -> None:
        """A line above the bar, as it stands: nothing in it is markup, and it is never wrapped."""
        self._console.print(text, markup=False, highlight=False, no_wrap=True, overflow="ignore", crop=False)

    def _time_left(self, step: int) -> str:
        seconds = (self._times[-1] - self._times[0]) / max(1, len(self._times) - 1) * max(0, self._total - step)
        return duration(seconds)


def step_line(metrics: StepMetrics, left: str, save: SaveMetrics | None = None) -> str:
    """One step under HEADER; what was not measured is a dash. save: a checkpoint to tell of."""
    mfu = "-" if metrics.mfu is None else f"{metrics.mfu:.1%}"
    load = "-" if metrics.worst_load is None else f"{metrics.worst_load:.2f}×"
    line = (
        f"{metrics.step:>6}  {metrics.loss:>7.4f}   {metrics.learning_rate:>13.3e}   {metrics.grad_norm:>9.3f}   "
        f"{metrics.tokens_per_second:>8,.0f}   {mfu:>5}   {load:>10}   {left:>4}"
    )
    if metrics.dropped > 0:
        line += f"   up to {metrics.dropped:.1%} dropped"
    if metrics.validation_loss is not None:
        line += f"   validation {metrics.validation_loss:.4f}"
    return line if save is None else f"{line}   {save.sentence}"


def duration(seconds: float) -> str:
    """A time in its two largest units: 45s, 3m20s, 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
