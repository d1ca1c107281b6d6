"""What a run's folder holds and where: the one contract between the launcher, the workers and the report.

run.json        the run, the prepared data, the command, the versions       written by the launcher before any worker
metrics.jsonl   one line a step                                             rank 0
tensorboard/    the same numbers                                            rank 0
samples.json    {"prompt", "before", "after"}                               rank 0
checkpoints/    ckpt/, or elsewhere: checkpoint.address in run.json          all ranks
checkpoints.jsonl   one line a checkpoint: how long it took                 rank 0
errors/         rank{r}.json of each rank that failed                       that rank
logs/start{n}/  rank{r}.stdout.txt, rank{r}.stderr.txt                      the launcher
summary.json    what the report prints that no other file says             the launcher
report.html, report/*.png                                                   the launcher
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.config.run import RunConfig
from core.config.serial import run_from_json, run_to_json
from core.errors import RequestError

FORMAT = 1
RUN_FILE = "run.json"
SAMPLES_FILE = "samples.json"
SUMMARY_FILE = "summary.json"
ERRORS_FOLDER = "errors"
LOGS_FOLDER = "logs"


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """What run.json holds.

    prepared: the folder of the tokens, and identity: what changes with any of them. command: as typed. versions: of Python
    and the libraries.
    """

    run: RunConfig
    prepared: str
    identity: str
    command: tuple[str, ...]
    versions: Mapping[str, str]


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
        )
    except KeyError as error:
        raise RequestError(f"{path}: has no entry {error}; the file is damaged.") from error
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from error


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
