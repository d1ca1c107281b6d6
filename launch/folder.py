"""What a run's folder holds and where: the one contract between the launcher, the workers and the report.

run.json        the run, the prepared data, the command, the versions       written by the launcher before any worker
plan.json       what was planned: `launch plan --json` of the last start     the launcher
metrics.jsonl   one line a step                                             rank 0
tensorboard/    the same numbers                                            rank 0
samples.json    {"prompt", "before", "after"}                               rank 0
checkpoints/    ckpt/, or elsewhere: checkpoint.address in run.json          all ranks
checkpoints.jsonl   one line a checkpoint: how long it took                 rank 0
assets/         the tokenizer and other files of weights that it began with the launcher
errors/         rank{r}.json of each rank that failed                       that rank
logs/start{n}/  rank{r}.stdout.txt, rank{r}.stderr.txt                      the launcher
ends/           rank{r}.json: how far the first rank of each node came       that rank
environment.json    variables of every rank, and why                         the launcher
events.jsonl    {"time", "event", …}: submitted, started, stopped, …         launcher, agents, scripts
submission.json where the run was started last, and as which job            the launcher
job.sh, job.yaml    what was submitted to a cluster, to the byte             the launcher
stop            there while a user has asked the run to stop                 `launch stop`
summary.json    what the report prints that no other file says             the launcher
report.html, report/*.png                                                   the launcher
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckpt.files.url import is_remote
from core.config.run import RunConfig
from core.config.serial import run_from_json, run_to_json
from core.errors import RequestError

FORMAT = 1
RUN_FILE = "run.json"
PLAN_FILE = "plan.json"
SAMPLES_FILE = "samples.json"
SUMMARY_FILE = "summary.json"
ERRORS_FOLDER = "errors"
LOGS_FOLDER = "logs"
ASSETS_FOLDER = "assets"
ENDS_FOLDER = "ends"
EVENTS_FILE = "events.jsonl"
SUBMISSION_FILE = "submission.json"
STOP_FILE = "stop"
ENVIRONMENT_FILE = "environment.json"


@dataclass(frozen=True, kw_only=True)
class Init:
    """Where the first weights of a run come from: `address` of a checkpoint or of a published model, `what` it is, in words."""

    address: str
    what: str


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """What run.json holds.

    prepared: the folder of the tokens, and identity: what changes with any of them. command: as typed. versions: of Python
    and the libraries. init: the weights that it began with, None for random ones.
    """

    run: RunConfig
    prepared: str
    identity: str
    command: tuple[str, ...]
    versions: Mapping[str, str]
    init: Init | None = None


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Where a run was started last: back end, its options as typed, and the name of the job there (a process, on this machine).

    restarts: how often its workers are started again after a failure. host: the machine that it was started from.
    """

    backend: str
    options: tuple[str, ...]
    restarts: int
    job: str
    host: str


def anywhere(address: str) -> str:
    """The same address as it is from any folder; a URL is that already."""
    return address if is_remote(address) else str(Path(address).expanduser().absolute())


def holds_run(folder: Path) -> bool:
    """Whether a run was started in `folder`."""
    return (folder / RUN_FILE).exists()


def write_run(folder: Path, file: RunFile) -> None:
    """Write run.json whole or not at all. Raises RequestError where the folder cannot be written."""
    data = {
        "format": FORMAT,
        "command": list(file.command),
        "prepared": file.prepared,
        "identity": file.identity,
        "versions": dict(file.versions),
        "init": None if file.init is None else asdict(file.init),
        "run": run_to_json(file.run),
    }
    write_json(folder / RUN_FILE, data)


def read_run(folder: Path) -> RunFile:
    """The run in `folder`. Raises RequestError where there is none, or where run.json is damaged or of another format."""
    path = folder / RUN_FILE
    if not path.exists():
        raise RequestError(f"{folder}: holds no run ({RUN_FILE} is missing). Give the folder that a launch printed.")
    data = read_json(path)
    if data.get("format") != FORMAT:
        raise RequestError(f"{path}: has format {data.get('format')!r}; this version reads format {FORMAT}.")
    try:
        return RunFile(
            run=run_from_json(data["run"]),
            prepared=str(data["prepared"]),
            identity=str(data["identity"]),
            command=tuple(map(str, data["command"])),
            versions=dict(data["versions"]),
            init=None if data.get("init") is None else Init(**data["init"]),
        )
    except KeyError as error:
        raise RequestError(f"{path}: has no entry {error}; the file is damaged.") from error
    except TypeError as error:
        raise RequestError(f"{path}: init is not an address and what is there; the file is damaged.") from error
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from error


def write_assets(folder: Path, assets: Mapping[str, bytes]) -> None:
    """Keep the files that came with the weights. Raises RequestError where the folder cannot be written."""
    path = folder / ASSETS_FOLDER
    try:
        for name, content in assets.items():
            path = folder / ASSETS_FOLDER / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except OSError as error:
        raise RequestError(f"{path}: cannot be written ({error.strerror}). Give another --out.") from error


def read_assets(folder: Path) -> dict[str, bytes]:
    """The files that came with the weights, by name; none for a run that began with random ones."""
    top = folder / ASSETS_FOLDER
    return {str(path.relative_to(top)): path.read_bytes() for path in sorted(top.rglob("*")) if path.is_file()}


def note_event(folder: Path, event: str, **details: Any) -> None:
    """Append a line to events.jsonl. Raises RequestError where the folder cannot be written."""
    line = json.dumps({"time": time.time(), "event": event, **details}, ensure_ascii=False) + "\n"
    path = folder / EVENTS_FILE
    try:
        # one write of a line to a file that is only appended to: lines of several writers do not mix
        with path.open("ab", buffering=0) as file:
            file.write(line.encode())
    except OSError as error:
        raise RequestError(f"{path}: cannot be written ({error.strerror}).") from error


def read_events(folder: Path) -> list[dict[str, Any]]:
    """What happened to the run, in order; a torn line is left out."""
    path, found = folder / EVENTS_FILE, []
    if not path.exists():
        return []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, TypeError):
            found.append(dict(json.loads(line)))
    return found


def write_submission(folder: Path, submission: Submission) -> None:
    """Write submission.json."""
    write_json(folder / SUBMISSION_FILE, asdict(submission))


def read_submission(folder: Path) -> Submission | None:
    """Where the run was started last; None where it never was. Raises RequestError where the file is damaged."""
    path = folder / SUBMISSION_FILE
    if not path.exists():
        return None
    data = read_json(path)
    try:
        return Submission(**{**data, "options": tuple(data["options"])})
    except (KeyError, TypeError) as error:
        raise RequestError(f"{path}: is not what a launch writes; the file is damaged.") from error


def write_json(path: Path, data: Any) -> None:
    """Write `data` whole or not at all. Raises RequestError where the folder cannot be written."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(data, file, indent=1, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise RequestError(f"{path}: cannot be written ({error.strerror}). Give another --out.") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises RequestError where it cannot be read or is not one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise RequestError(f"{path}: is not JSON; the file is damaged.") from error
    if not isinstance(data, dict):
        raise RequestError(f"{path}: is not a JSON object; the file is damaged.")
    return data
