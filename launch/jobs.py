"""What a run that was started is doing: `launch status|logs|stop RUN`, for every place to run, from its folder."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from core.config.run import RunConfig
from core.errors import RequestError
from core.training.metrics import read_metrics
from launch.again import state_of
from launch.backends.choose import choose_backend
from launch.backends.failures import find_failures
from launch.backends.protocol import State
from launch.folder import LOGS_FOLDER, STOP_FILE, Submission, note_event, read_events, read_run, read_submission
from launch.progress import duration

POLL_SECONDS = 0.5
# A line of events.jsonl says so of how a start ended.
ENDS = ("finished", "stopped", "failed")
SHOWN_EVENTS = 6
MEANT_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class Status:
    """Where a run is. step, loss, …: of the last step that was measured, None before the first. checkpoint: step of the newest whole one."""

    backend: str
    job: str
    state: State
    steps: int
    step: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    tokens_per_second: float | None = None
    left_seconds: float | None = None
    checkpoint: int | None = None
    failed: str | None = None
    events: tuple[str, ...] = ()


def status(out: Path) -> Status:
    """What the run in `out` is doing. Raises RequestError where there is none, or where its place to run does not answer."""
    run = read_run(out).run
    submission = read_submission(out)
    state = _state(out, submission)
    measured = read_metrics(out)
    last = measured[-1] if measured else {}
    validated = [line["validation_loss"] for line in measured if "validation_loss" in line]
    rates = [line["tokens_per_second"] for line in measured[-MEANT_STEPS:]]
    rate = sum(rates) / len(rates) if rates else None
    batch = run.train.global_batch * run.train.sequence_tokens
    to_go = run.train.steps - last.get("step", 0)
    failures = find_failures(out, ())
    return Status(
        backend=submission.backend if submission else "-",
        job=submission.job if submission else "-",
        state=state,
        steps=run.train.steps,
        step=last.get("step"),
        loss=last.get("loss"),
        validation_loss=validated[-1] if validated else None,
        tokens_per_second=rate,
        left_seconds=to_go * batch / rate if rate and state.where == "running" else None,
        checkpoint=_checkpoint(out, run),
        failed=f"rank {failures[0].rank}: {failures[0].message}" if failures else None,
        events=tuple(map(_event_line, read_events(out)[-SHOWN_EVENTS:])),
    )


def status_text(out: Path, found: Status) -> str:
    """The status for a terminal."""
    done = "no step yet" if found.step is None else f"{found.step} of {found.steps}"
    lines = [
        f"{out}",
        f"  job         {found.job} on {found.backend}: {found.state.words}",
        f"  step        {done}" + (f", {duration(found.left_seconds)} left" if found.left_seconds else ""),
    ]
    if found.loss is not None:
        validation = "" if found.validation_loss is None else f", validation {found.validation_loss:.4f}"
        lines.append(f"  loss        {found.loss:.4f}{validation}")
    if found.tokens_per_second is not None:
        lines.append(f"  tokens/s    {found.tokens_per_second:,.0f}")
    lines.append(f"  checkpoint  {'none yet' if found.checkpoint is None else f'of step {found.checkpoint}'}")
    if found.failed:
        lines.append(f"  failed      {found.failed}")
    return "\n".join([*lines, *(f"  {event}" for event in found.events)])


def logs(out: Path, rank: int | None, follow: bool, say: Callable[[str], None] = click.echo) -> None:
    """Say the newest output of a rank (None: of rank 0 and of the agents): its log files, each behind a line with its name.

    follow: go on until the run's job has ended. Raises RequestError where the rank has written nothing.
    """
    run = read_run(out).run
    if rank is not None and not 0 <= rank < run.ranks:
        raise RequestError(f"--rank {rank}: the run has ranks 0 to {run.ranks - 1}.")
    seen: dict[Path, int] = {}
    shown: Path | None = None
    while True:
        state = _state(out, read_submission(out)) if follow else None
        for path in log_files(out, rank):
            text, seen[path] = _more(path, seen.get(path, 0))
            if text:
                if path != shown:
                    say(f"==> {path} <==")
                say(text.rstrip("\n"))
                shown = path
        if state is None or state.where == "gone":
            break
        time.sleep(POLL_SECONDS)
    if shown is None:
        where = "On this machine, what rank 0 prints stays on the terminal."
        raise RequestError(f"{out / LOGS_FOLDER}: rank {rank or 0} has written nothing yet. {where}")


def log_files(out: Path, rank: int | None) -> list[Path]:
    """The files with the output of a rank's newest start, and of the newest job's agents where no rank is named."""
    folder = out / LOGS_FOLDER
    starts = sorted(folder.glob("start*"), key=lambda path: int(path.name.removeprefix("start")))
    agents = sorted(folder.glob("slurm-*.txt"), key=lambda path: path.stat().st_mtime)[-1:] if rank is None else []
    ranks = [starts[-1] / f"rank{rank or 0}.{stream}.txt" for stream in ("stdout", "stderr")] if starts else []
    return [*agents, *(path for path in ranks if path.exists())]


def stop(out: Path) -> str:
    """Have the run save a checkpoint and end, wherever it is; what was done, in words. It is not started again by itself.

    Raises RequestError where the run was never started or its place to run does not answer.
    """
    read_run(out)
    submission = read_submission(out)
    if submission is None:
        raise RequestError(f"{out}: was never started.")
    state = _state(out, submission)
    if state.where == "gone":
        return f"{out}: nothing to stop, job {submission.job} is {state.words}"
    # before the signal: the agents look for it when their workers have ended
    (out / STOP_FILE).touch()
    choose_backend(submission.backend, submission.options).stop(submission.job)
    note_event(out, "stop asked", job=submission.job)
    if state.where == "waiting":
        return f"job {submission.job} was waiting and is taken out of the queue"
    return f"job {submission.job} saves a checkpoint and ends; go on with: launch resume {out}"


def _state(out: Path, submission: Submission | None) -> State:
    """Where the job is; of one that is gone, how its last start ended, as far as the run's folder knows."""
    if submission is None:
        return State(where="gone", words="never started")
    state = state_of(submission)
    if state.where != "gone":
        return state
    ends = [event for event in read_events(out) if event["event"] in (*ENDS, "submitted", "printed", "started")]
    last = ends[-1]["event"] if ends else ""
    if last == "started":
        return State(where="gone", words=f"ended without a word, perhaps killed ({state.words})")
    return State(where="gone", words=last if last in ENDS else state.words)


def _checkpoint(out: Path, run: RunConfig) -> int | None:
    from ckpt.shelf.address import steps

    found = steps(run.checkpoint.address or str(out))
    return found[-1] if found else None


def _event_line(event: dict[str, object]) -> str:
    when = datetime.datetime.fromtimestamp(float(str(event.get("time", 0)))).strftime("%Y-%m-%d %H:%M:%S")
    details = [f"{name} {value}" for name, value in event.items() if name not in ("time", "event") and value != ""]
    return f"{when}  {event.get('event')}" + (f": {', '.join(details)}" if details else "")


def _more(path: Path, begin: int) -> tuple[str, int]:
    """What a file holds from `begin` on, and where that ends."""
    with path.open("rb") as file:
        file.seek(begin)
        data = file.read()
    return data.decode("utf-8", errors="replace"), begin + len(data)
