"""What starts a run's workers: one protocol, one file per place to run.

A back end turns a Job into a Script and starts it: on this machine, which waits for the end, or on a cluster, which takes the script and
answers with a name. What is shown of a script is byte for byte what is submitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from core.errors import ZooError

# With it an agent says that the workers have saved and ended before their last step, and that the job is to be started again.
# It is EX_TEMPFAIL of sysexits.h.
STARTED_AGAIN_CODE = 75


class JobError(ZooError):
    """The workers failed: the message shows the first failing rank's own error."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be started: `ranks` workers, each told the run folder `out`, which holds run.json.

    cuda: whether every rank needs a GPU of its own. gpus_per_node: of the hardware, None where it is not known. domain: GPUs that are
    joined by NVLink. expert_ranks: ranks next to each other that exchange tokens. restarts: how often the workers are started again
    after a failure. environment: name, value and reason of the variables that the workers get. python: the interpreter here, and code:
    the folder with the zoo. reads: what the workers read beside `out`.
    """

    ranks: int
    out: Path
    cuda: bool = False
    gpus_per_node: int | None = None
    domain: int = 1
    expert_ranks: int = 1
    restarts: int = 0
    environment: tuple[tuple[str, str, str], ...] = ()
    python: str = "python3"
    code: Path = Path()
    reads: tuple[Path, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Script:
    """What a cluster is given: the text, and what the file is called in the run's folder."""

    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How starting a job that did not fail ended.

    stopped: by a signal, the workers having saved what they had. submitted: to a cluster, as `job`. printed: nothing was started.
    """

    ended: Literal["finished", "stopped", "submitted", "printed"]
    job: str = ""


@dataclass(frozen=True, kw_only=True)
class State:
    """Where a job is, as its place to run says. waiting: not started yet, or to be started again. words: in its own words."""

    where: Literal["running", "waiting", "gone"]
    words: str


class Backend(Protocol):
    """A place to run."""

    def refuse(self, job: Job) -> None:
        """Raises ConfigError or RequestError where the job cannot be started from here, before anything is written."""
        ...

    def script(self, job: Job) -> Script | None:
        """What will be submitted, or None where nothing is. Raises ConfigError where the options do not fit the job."""
        ...

    def start(self, job: Job) -> Outcome:
        """Start the workers and wait for all of them, or submit the script. Raises JobError where a worker fails."""
        ...

    def state(self, job: str) -> State:
        """Where the job is. Raises RequestError where the place to run does not answer."""
        ...

    def stop(self, job: str) -> None:
        """Have the workers save and end. Raises RequestError where the place to run does not answer."""
        ...
