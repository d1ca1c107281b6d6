"""What a run measures: one line of `metrics.jsonl` a step and one of `checkpoints.jsonl` a checkpoint, the same numbers for
TensorBoard, and how to read them back.

Free of torch: the launcher and the report read the same file.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from core.training.insight import LayerInsight, PrecisionInsight

METRICS_FILE = "metrics.jsonl"
SAVES_FILE = "checkpoints.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What was measured in one optimizer step; what was not measured is None and is left out of the file.

    step: counted from one. loss: mean next-token loss of the global batch, nats. tokens: trained on so far, all steps.
    mfu: model FLOP a second over the measured matmul peak, 0 to 1. worst_load: the busiest expert's load over the mean,
    the largest of all layers. expert_load: per MoE layer (canonical name) the share of the routed rows of each expert.
    insight: per MoE layer, how its experts are used. precision: per layer and kind of operand (`input`, `weight`, `gradient`), what a recipe's
    rounding lost, in steps that measure it. seconds: wall time per phase (`data`, `forward_backward`, `optimizer`, …);
    `checkpoint` is what training has stopped for the checkpoint behind the step before. validation_loss: where it was measured.
    loss_scale: of this step, in float16. skipped: steps so far whose gradient overflowed, which updated nothing.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_second: float
    tokens: int
    mfu: float | None = None
    worst_load: float | None = None
    expert_load: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    insight: Mapping[str, LayerInsight] = field(default_factory=dict)
    precision: Mapping[str, Mapping[str, PrecisionInsight]] = field(default_factory=dict)
    mtp_loss: float | None = None
    aux_loss: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    validation_loss: float | None = None
    loss_scale: float | None = None
    skipped: int | None = None

    @property
    def dropped(self) -> float:
        """The share of the choices that found no room, in the layer where it is largest."""
        return max((layer.dropped for layer in self.insight.values()), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """The line's object. A number that is not finite becomes null, which JSON has and NaN it has not."""
        held = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: _plain(value) for name, value in held.items() if value is not None and value != {}}


@dataclass(frozen=True, kw_only=True)
class SaveMetrics:
    """What was measured of the checkpoint of `step`: how long it took, and for how much of that training stopped on this rank.

    bytes: of all tensors, on all ranks.
    """

    step: int
    seconds: float
    stalled_seconds: float
    bytes: int

    @property
    def sentence(self) -> str:
        """In words."""
        return (
            f"training stopped {self.stalled_seconds:.2f} s for the checkpoint of step {self.step}, "
            f"which took {self.seconds:.2f} s"
        )


class MetricsWriter:
    """Appends steps to `metrics.jsonl`, checkpoints to `checkpoints.jsonl`, and both to TensorBoard's event file in `folder`; every
    line is on disk when it is written.

    resume_from_step: the step of the checkpoint that the run continues from (0: from the start, None: a new run). Later
    lines are dropped first, so that the file holds each step once; a torn last line goes the same way.
    Raises FileExistsError for a new run in a folder that has metrics.
    """

    def __init__(self, folder: Path, resume_from_step: int | None = None) -> None:
        path = folder / METRICS_FILE
        folder.mkdir(parents=True, exist_ok=True)
        if resume_from_step is not None:
            _truncate(path, resume_from_step)
            if (folder / SAVES_FILE).exists():
                _truncate(folder / SAVES_FILE, resume_from_step)
        self._folder = folder
        self._file = path.open("x" if resume_from_step is None else "a", encoding="utf-8", buffering=1)
        self._events = _EventFile(folder / TENSORBOARD_FOLDER, resume_from_step)

    def write(self, metrics: StepMetrics) -> None:
        """Append one step."""
        self._file.write(json.dumps(metrics.to_json(), allow_nan=False) + "\n")
        self._events.write(metrics)

    def write_save(self, save: SaveMetrics) -> None:
        """Append one checkpoint."""
        with (self._folder / SAVES_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(save), allow_nan=False) + "\n")
        self._events.write_save(save)

    def close(self) -> None:
        """Flush and close both files."""
        self._file.close()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps in a metrics.jsonl (or in the run folder that has one), in order; none where there is no file yet.

    A last line that a kill tore in half is left out. Raises ValueError naming the line where another one is damaged.
    """
    return _read_lines(path / METRICS_FILE if path.is_dir() else path)


def read_saves(run: Path) -> list[SaveMetrics]:
    """The checkpoints in the checkpoints.jsonl of a run folder, in order; faults as in `read_metrics`."""
    return [SaveMetrics(**line) for line in _read_lines(run / SAVES_FILE)]


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}: line {number} is not a JSON object") from error
    return found


def _truncate(path: Path, step: int) -> None:
    """Drop the lines after `step`, through a temporary file: a kill leaves the old file or the new one."""
    kept = [line for line in _read_lines(path) if line["step"] <= step]
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _EventFile:
    """TensorBoard's event file through the tensorboard package itself, which needs neither torch nor tensorflow."""

    def __init__(self, folder: Path, resume_from_step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder), flush_secs=10)
        if resume_from_step is not None:
            # tells TensorBoard to hide what an earlier file holds from this step on
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=resume_from_step + 1, session_log=start))

    def write(self, metrics: StepMetrics) -> None:
        self._add(metrics.step, scalars(metrics))

    def write_save(self, save: SaveMetrics) -> None:
        named = ("seconds", save.seconds), ("stalled_seconds", save.stalled_seconds), ("bytes", float(save.bytes))
        self._add(save.step, [(f"checkpoint/{name}", value) for name, value in named])

    def _add(self, step: int, scalars: Iterable[tuple[str, float]]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars]
        self._writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=values)))

    def close(self) -> None:
        self._writer.close()


def scalars(metrics: StepMetrics) -> Iterator[tuple[str, float]]:
    """The curves of one step, under the tags that TensorBoard groups them by."""
    named = {
        "loss/train": metrics.loss,
        "loss/validation": metrics.validation_loss,
        "loss/multi_token": metrics.mtp_loss,
        "loss/balance": metrics.aux_loss,
        "optimizer/learning_rate": metrics.learning_rate,
        "optimizer/grad_norm": metrics.grad_norm,
        "optimizer/loss_scale": metrics.loss_scale,
        "optimizer/skipped": metrics.skipped,
        "speed/tokens_per_second": metrics.tokens_per_second,
        "speed/mfu": metrics.mfu,
        "experts/worst_load": metrics.worst_load,
    }
    yield from ((tag, value) for tag, value in named.items() if value is not None)
    for phase, seconds in metrics.seconds.items():
        yield f"seconds/{phase}", seconds
    for layer, load in metrics.expert_load.items():
        if load and sum(load) > 0:
            yield f"experts/{layer}", max(load) * len(load) / sum(load)
    for layer, insight in metrics.insight.items():
        for name, value in asdict(insight).items():
            yield f"experts/{name}/{layer}", value
    for layer, operands in metrics.precision.items():
        for operand, of_operand in operands.items():
            for name in ("relative_error", "amax", "saturated", "flushed"):
                yield f"precision/{name}/{layer}/{operand}", vars(of_operand)[name]
