"""What starts a run's workers and waits for them: one protocol, one file per place to run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from core.errors import ZooError


class JobError(ZooError):
    """The workers failed: the message shows the first failing rank's own error."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be started: `ranks` workers, each told the run folder `out`, which holds run.json."""

    ranks: int
    out: Path


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job that did not fail ended. `stopped`: by a signal, the workers having saved what they had."""

    ended: Literal["finished", "stopped"]


class Backend(Protocol):
    """A place to run."""

    def start(self, job: Job) -> Outcome:
        """Start the workers and wait for all of them. Raises JobError where one fails."""
        ...
