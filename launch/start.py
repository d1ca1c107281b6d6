"""One launch from request to report: plan, refuse early, prepare the data, start the workers, draw the report."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from core.check.built import not_built
from core.config.family import find_family
from core.config.run import RunConfig
from core.errors import ConfigError, Fault, RequestError
from launch.again import changes, confirm, refuse_running
from launch.backends.choose import LOCAL, PRINT, choose_backend
from launch.backends.local import this_process
from launch.backends.protocol import Backend, Job, JobError, Script
from launch.describe import describe, head_lines, plan_to_json
from launch.ending import end_run, fail_run, last_step
from launch.environment import EnvironmentVariable
from launch.folder import (
    ASSETS_FOLDER,
    PLAN_FILE,
    STOP_FILE,
    SUMMARY_FILE,
    RunFile,
    Submission,
    holds_run,
    note_event,
    read_json,
    read_run,
    read_submission,
    write_assets,
    write_json,
    write_run,
    write_submission,
)
from launch.job import job_environment, make_job, write_environment, write_script
from launch.plan.result import Plan
from launch.plan.text import plan_lines
from launch.request import INIT, Initial, Planned, Request, new_run, resumed_run

if TYPE_CHECKING:
    from core.data.tokens import TokenFiles

LIBRARIES = ("torch", "numpy", "tokenizers", "tensorstore", "zarr")


@dataclass(frozen=True, kw_only=True)
class Start:
    """`launch MODEL` as typed. options: the fields of Request. init: where a new run takes its weights from.

    backend, cluster: where it runs, and the texts of --cluster. restarts: how often the workers are started again after a failure.
    yes: go on with other settings than the run had, without being asked.
    """

    model: str
    out: Path | None
    resume: bool
    dry_run: bool
    options: Mapping[str, Any]
    init: str | None = None
    backend: str = LOCAL
    cluster: tuple[str, ...] = ()
    restarts: int = 0
    yes: bool = False


@dataclass(frozen=True, kw_only=True)
class Begin:
    """What a run begins with beside its plan: files that came with its weights, and the tokenizer among them if its text needs it."""

    assets: Mapping[str, bytes]
    tokenizer: bytes | None


def start(asked: Start, backend: Backend | None = None) -> None:
    """Carry it out on `backend` (None: on this machine).

    Raises ZooError: RequestError before anything is started, JobError where the workers fail.
    """
    family = find_family(asked.model)
    request = Request(**{**asked.options, "settings": tuple(asked.options["settings"])})
    begin = Begin(assets={}, tokenizer=None)
    if asked.resume:
        out = _resumable(asked)
        begun = read_run(out)
        planned = replace(resumed_run(request, family, begun.run), init=begun.init)
    else:
        begun = None
        initial = _initial(asked.init)
        planned = new_run(request, family, initial)
        out = asked.out or _new_folder(planned.run)
        _refuse_taken(out)
        if initial is not None:
            planned, begin = _with_tokenizer(planned, initial, out)
    backend = backend or choose_backend(asked.backend, asked.cluster)
    variables = job_environment(planned, out if asked.resume else None)
    job = make_job(planned.run, out, asked.restarts, variables)
    if asked.dry_run:
        _show(planned, job, backend, variables)
        return
    try:
        _refuse_unstartable(planned.run, job, backend)
    except RequestError:
        # On a laptop one sees the job that a cluster would start.
        if _needs_cluster(job):
            _show(planned, job, backend, variables)
        raise
    if begun is None:
        _refuse_used(planned.run.checkpoint.address)
    else:
        refuse_running(out)
        confirm(changes(begun.run, planned.run), asked.yes)
    # What is printed to be submitted is to stand alone.
    aside = asked.backend == PRINT
    plan = _plan(planned.run)
    click.echo("\n".join([*head_lines(planned, out), "", *plan_lines(planned.run, plan)]), err=aside)
    tokens = _prepare(planned.run, begun, begin.tokenizer, aside)
    job = replace(job, reads=(tokens.folder.absolute(),))
    backend.refuse(job)
    write_assets(out, begin.assets)
    write_run(out, _run_file(planned, tokens))
    write_json(out / PLAN_FILE, plan_to_json(planned, plan, variables))
    write_environment(out, variables)
    _write_summary(out, planned.run, tokens)
    click.echo(f"run folder: {out}", err=aside)
    start_job(asked, planned.run, job, backend)


def _refuse_unstartable(run: RunConfig, job: Job, backend: Backend) -> None:
    """Raises RequestError where the engine cannot do what is asked, or the place cannot run it."""
    if unbuilt := not_built(run):
        raise ConfigError(unbuilt)
    backend.refuse(job)


def _needs_cluster(job: Job) -> bool:
    """Whether the job is for more than one node."""
    return job.gpus_per_node is not None and job.ranks > job.gpus_per_node


def _show(planned: Planned, job: Job, backend: Backend, variables: Sequence[EnvironmentVariable]) -> None:
    """The whole plan, and the script; of a job for a cluster that was not said, the one for Slurm."""
    script = backend.script(job)
    if script is None and _needs_cluster(job):
        script = choose_backend(PRINT, ()).script(job)
    click.echo("\n".join([describe(planned, _plan(planned.run), job.out, variables), *_script_lines(script)]))


def _plan(run: RunConfig) -> Plan:
    """The plan of a run; the real modules tell, and with them torch is loaded."""
    from launch.plan.make import make_plan

    return make_plan(run)


def resume(out: Path, options: Mapping[str, Any], *, cluster: tuple[str, ...] = (), yes: bool = False) -> None:
    """Start the run in `out` again where and as it was started last; cluster: options of that place to run, where others are wanted.

    Raises ZooError as `start` does.
    """
    submission = read_submission(out)
    asked = Start(
        model=read_run(out).run.family,
        out=out,
        resume=True,
        dry_run=False,
        options=options,
        backend=submission.backend if submission else LOCAL,
        cluster=cluster or (submission.options if submission else ()),
        restarts=submission.restarts if submission else 0,
        yes=yes,
    )
    start(asked)


def _script_lines(script: Script | None) -> Iterator[str]:
    """The script for a terminal, as it would be submitted."""
    if script is not None:
        yield from ("", f"script (it would be {script.name} in the run folder)", *script.text.splitlines())


def _initial(address: str | None) -> Initial | None:
    """The weights at an address, opened."""
    if address is None:
        return None
    from launch.initial import open_initial

    return open_initial(address)


def _with_tokenizer(planned: Planned, initial: Initial, out: Path) -> tuple[Planned, Begin]:
    """The plan with the tokenizer of the weights, which the run's folder will hold, where its text is to be tokenised with it."""
    from launch.initial import TOKENIZER, tokenizer_for

    tokenizer = tokenizer_for(initial, planned.run)
    if tokenizer is not None:
        path = str((out / ASSETS_FOLDER / TOKENIZER).absolute())
        run = replace(planned.run, data=replace(planned.run.data, tokenizer=path))
        planned = replace(planned, run=run, origins={**planned.origins, "data.tokenizer": INIT})
    return planned, Begin(assets=initial.assets, tokenizer=tokenizer)


def start_job(asked: Start, run: RunConfig, job: Job, backend: Backend) -> None:
    """Write the script and where the run is started, and start it; here, wait for it and draw the report, also where it was stopped.

    Raises JobError where the workers fail, RequestError where a cluster does not take the script.
    """
    out, script = job.out, backend.script(job)
    (out / STOP_FILE).unlink(missing_ok=True)
    if asked.resume:
        note_event(out, "resumed", after_step=last_step(out))
    if script is None:
        _note_submission(asked, out, this_process())
        note_event(out, "started", job=this_process(), after_step=last_step(out))
        _wait(run, job, backend)
        return
    write_script(out, script)
    try:
        outcome = backend.start(job)
    except RequestError as error:
        place = ["--backend", asked.backend, *(word for text in asked.cluster for word in ("--cluster", text))]
        again = f"{_how_to_go_on(run, out)} {shlex.join(place)}"
        raise RequestError(f"{error}\nNothing was started. When that is put right, {again}") from error
    _note_submission(asked, out, outcome.job)
    note_event(out, outcome.ended, backend=asked.backend, job=outcome.job, script=script.name)
    if outcome.ended == "submitted":
        click.echo(f"submitted as job {outcome.job}; see: {shlex.join(['launch', 'status', str(out)])}")


def _note_submission(asked: Start, out: Path, job: str) -> None:
    submission = Submission(
        backend=asked.backend,
        options=tuple(asked.cluster),
        restarts=asked.restarts,
        job=job,
        host=platform.node(),
    )
    write_submission(out, submission)


def _wait(run: RunConfig, job: Job, backend: Backend) -> None:
    """Run the workers of a job here."""
    out, begun = job.out, time.monotonic()
    try:
        outcome = backend.start(job)
    except JobError as error:
        fail_run(out, time.monotonic() - begun, str(error))
        raise JobError(f"{error}\n{_how_to_go_on(run, out)}", exit_code=error.exit_code) from error
    page = end_run(out, outcome.ended, time.monotonic() - begun)
    if outcome.ended == "finished":
        click.echo(f"report: {page}")
        return
    step = last_step(out)
    at = f"stopped at step {step}, checkpoint saved" if step else "stopped before the first step"
    click.echo(f"{at}; {_how_to_go_on(run, out)}")


def _how_to_go_on(run: RunConfig, out: Path) -> str:
    """The command that continues from the last checkpoint (or from the start, where there is none yet)."""
    return "continue with: " + shlex.join(["launch", run.family, "--resume", "--out", str(out)])


def _resumable(asked: Start) -> Path:
    """The folder to resume in. Raises RequestError where none is named, it holds no run, or other weights are named."""
    out = asked.out
    if asked.init is not None:
        rule = "is for new runs; a run that is resumed goes on from its own checkpoints"
        raise ConfigError([Fault(setting=INIT, value=asked.init, rule=rule, works=f"no {INIT}, or no --resume")])
    if out is None:
        runs = sorted(Path("runs").glob("*/run.json"), key=lambda path: path.stat().st_mtime)
        works = f"--out {runs[-1].parent}" if runs else "--out DIR"
        raise ConfigError([Fault(setting="--resume", value="", rule="needs the folder of the run", works=works)])
    if not holds_run(out):
        raise RequestError(f"--out {out}: holds no run to resume. Leave --resume out to start one there.")
    return out


def _new_folder(run: RunConfig) -> Path:
    """A folder under runs/ that is not there yet."""
    stem = f"{run.family}-{run.size}-{run.hardware}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem, *(f"{stem}-{number}" for number in range(2, 1000)))
    return next(path for path in (Path("runs") / name for name in names) if not path.exists())


def _refuse_taken(out: Path) -> None:
    """A new run never writes over what is there."""
    if holds_run(out):
        raise RequestError(f"--out {out}: holds a run already. Add --resume to continue it, or give another folder.")
    if out.exists() and not out.is_dir():
        raise RequestError(f"--out {out}: is a file. Give a folder that is new or empty.")
    if out.exists() and any(out.iterdir()):
        raise RequestError(f"--out {out}: is not empty and holds no run. Give a folder that is new or empty.")


def _refuse_used(address: str | None) -> None:
    """A new run never goes on from another run's checkpoints, nor removes them."""
    if address is None:
        return
    from ckpt.shelf.address import steps

    found = steps(address)
    if found:
        raise RequestError(
            f"checkpoint.address={address}: holds checkpoints of another run already, up to step {found[-1]}. Give a place where "
            "there are none."
        )


def _prepare(run: RunConfig, begun: RunFile | None, tokenizer: bytes | None, aside: bool) -> TokenFiles:
    """The token files, made or found in the cache; for a resumed run the very same ones. Raises DataError, RequestError.

    tokenizer: what will be in run.data.tokenizer, None where it is there already: before the data is known to be good, the run has
    no folder. aside: standard output is for something else.
    """
    from core.data.tokens import cached

    with TemporaryDirectory() as folder, _status("reading and tokenising the data (once; cached afterwards)", aside):
        path = run.data.tokenizer
        if tokenizer is not None:
            path = str(Path(folder) / "tokenizer.json")
            Path(path).write_bytes(tokenizer)
        found = _still_there(begun) if begun else None
        tokens = found or cached(
            source=run.data.path,
            vocab=run.model.vocab,
            tokenizer=path,
            validation_fraction=run.data.validation_fraction,
            cache_root=cache_folder(),
        )
    if begun and tokens.identity != begun.identity:
        raise RequestError(
            f"data.path={run.data.path}: the data has changed since the run began, so it cannot be continued on it. "
            "Put the old data back, or start a new run."
        )
    return tokens


def _still_there(begun: RunFile) -> TokenFiles | None:
    """The token files that the run began with, if they are still whole."""
    from core.data.tokens import open_tokens
    from core.errors import DataError

    try:
        tokens = open_tokens(Path(begun.prepared), vocab=begun.run.model.vocab)
    except DataError:
        return None
    return tokens if tokens.identity == begun.identity else None


def cache_folder() -> Path:
    """Where prepared corpora are kept: the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "moe-zoo" / "tokens"


def _status(text: str, aside: bool) -> AbstractContextManager[Any]:
    """A spinner on a terminal, a line elsewhere."""
    if aside or not sys.stdout.isatty():
        click.echo(text, err=aside)
        return nullcontext()
    from rich.console import Console

    return Console().status(text)


def _run_file(planned: Planned, tokens: TokenFiles) -> RunFile:
    return RunFile(
        run=planned.run,
        prepared=str(tokens.folder),
        identity=tokens.identity,
        command=tuple(sys.argv),
        versions={"python": platform.python_version(), **_versions()},
        init=planned.init,
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _write_summary(out: Path, run: RunConfig, tokens: TokenFiles) -> None:
    """What the report prints that no other file says; a resumed run keeps the time of its earlier starts."""
    from core.config.counts import count_parameters
    from core.data.tokens import unigram_entropy

    before = read_json(out / SUMMARY_FILE) if (out / SUMMARY_FILE).exists() else {}
    counts = count_parameters(run.model)
    summary = {
        **before,
        "unigram_entropy": unigram_entropy(tokens.validation),
        "train_tokens": len(tokens.train.tokens),
        "validation_tokens": len(tokens.validation.tokens),
        "source": tokens.source,
        "parameters": counts.total,
        "active_parameters": counts.active,
        "ended": "running",
    }
    write_json(out / SUMMARY_FILE, summary)
