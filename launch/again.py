"""Starting a run again: what changed since it was started last, whether the user wants that, and that it does not run already."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from core.config.override import settings
from core.config.run import RunConfig
from core.errors import RequestError
from launch.backends.choose import LOCAL, choose_backend
from launch.backends.local import this_process
from launch.backends.protocol import State
from launch.folder import Submission, read_submission

# What becomes of a checkpoint's moments, by the format in which they are kept from now on.
_CONVERTED = {
    "precision.moments": {
        "bfloat16": "moments of the checkpoint are rounded to nearest even",
        "float16": "moments of the checkpoint are rounded to nearest even, with a scale for 128",
        "float8": "moments of the checkpoint are rounded to nearest even, with a scale for 128",
        "float32": "moments of the checkpoint are widened exactly",
    },
}


def changes(before: RunConfig, after: RunConfig) -> tuple[str, ...]:
    """One line for every setting that differs, as `train.steps: 120 → 240`, and what that does to a checkpoint where it converts it."""
    old = {"hardware": before.hardware, "ranks": before.ranks, **settings(before)}
    new = {"hardware": after.hardware, "ranks": after.ranks, **settings(after)}
    keys = [key for key in [*old, *(key for key in new if key not in old)] if old.get(key) != new.get(key)]
    return tuple(f"{key}: {_shown(old.get(key))} → {_shown(new.get(key))}{_effect(key, new.get(key))}" for key in keys)


def confirm(changed: Sequence[str], yes: bool) -> None:
    """Show what changed and have it confirmed. Raises RequestError without a terminal to ask on, click.Abort where the user does not want it."""
    if not changed:
        return
    text = "\n".join(
        ["The run goes on with other settings than it was started with:", *(f"  {line}" for line in changed)]
    )
    if yes:
        click.echo(text, err=True)
    elif sys.stdin.isatty():
        click.echo(text, err=True)
        click.confirm("Go on?", abort=True, err=True)
    else:
        raise RequestError(f"{text}\nAdd --yes to go on with them; nothing was started.")


def refuse_running(out: Path) -> None:
    """Raises RequestError where the run is running or waits to: two starts at once would write over each other."""
    submission = read_submission(out)
    if submission is None or submission.job == this_process():
        return
    state = state_of(submission)
    if state.where != "gone":
        stop = shlex.join(["launch", "stop", str(out)])
        raise RequestError(f"{out}: job {submission.job} is {state.words}. Wait for its end, or end it: {stop}")


def state_of(submission: Submission) -> State:
    """Where the job of a submission is. Raises RequestError where the place to run does not answer."""
    if submission.backend == LOCAL and submission.host != platform.node():
        return State(where="gone", words=f"on {submission.host}, where nothing can be seen from here")
    return choose_backend(submission.backend, submission.options).state(submission.job)


def _effect(key: str, value: object) -> str:
    found = _CONVERTED.get(key, {}).get(_shown(value))
    return f" ({found})" if found else ""


def _shown(value: object) -> str:
    return "none" if value is None else ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
