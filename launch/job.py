"""A planned run as a job for a back end: how many ranks of what kind, which of them talk, and their environment."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import launch
from core.config.run import RunConfig
from core.errors import RequestError
from launch.backends.protocol import Job, Script
from launch.environment import EnvironmentVariable, environment
from launch.folder import ENVIRONMENT_FILE, read_json, write_json
from launch.profiles import Profile, find_profile
from launch.request import Planned

# Why a variable is set that no setting asks for (launch/environment.py).
SET_UP = "the set-up's own"


def make_job(
    run: RunConfig,
    out: Path,
    restarts: int = 0,
    variables: Sequence[EnvironmentVariable] = (),
    profile: Profile | None = None,
) -> Job:
    """The job of a run in folder `out`. profile: of its hardware, None for the one of that name."""
    profile = profile or find_profile(run.hardware)
    fabric = profile.fabric
    return Job(
        ranks=run.ranks,
        out=out,
        cuda=profile.device == "cuda",
        gpus_per_node=fabric.gpus_per_node if fabric else None,
        domain=fabric.domain if fabric else 1,
        expert_ranks=run.parallel.etp * run.parallel.ep,
        restarts=restarts,
        environment=tuple((variable.name, variable.value, variable.why) for variable in variables),
        python=sys.executable,
        code=Path(launch.__file__).resolve().parents[1],
    )


def job_environment(planned: Planned, begun: Path | None) -> tuple[EnvironmentVariable, ...]:
    """The variables of the ranks. begun: the folder of the run that is resumed, whose set-up's own ones stay where no other is named."""
    own: tuple[tuple[str, str], ...] = ()
    if planned.preset is not None:
        own = planned.preset.environment
    elif begun is not None and (begun / ENVIRONMENT_FILE).exists():
        held = read_json(begun / ENVIRONMENT_FILE)
        own = tuple((name, str(entry["value"])) for name, entry in held.items() if entry["why"] == SET_UP)
    return environment(planned.run, own)


def write_environment(out: Path, variables: Sequence[EnvironmentVariable]) -> None:
    """Keep the variables and their reasons in the run's folder. Raises RequestError where it cannot be written."""
    write_json(out / ENVIRONMENT_FILE, {variable.name: asdict(variable) for variable in variables})


def write_script(out: Path, script: Script) -> None:
    """Put the script into the run's folder, to the byte. Raises RequestError where it cannot be written."""
    path = out / script.name
    try:
        path.write_bytes(script.text.encode())
    except OSError as error:
        raise RequestError(f"{path}: cannot be written ({error.strerror}).") from error
