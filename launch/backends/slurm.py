"""Slurm: one batch script, one agent on every node, and a job that saves and goes on where its time or its nodes are taken away.

The script's own shell receives SIGUSR1 some time before the limit (`grace`), hands it to the agents, and these to their workers, which save
and end. An agent then ends with exit code 75, and the script has Slurm start the job again, which goes on from that checkpoint. A
preempted job is told by SIGTERM, which Slurm sends to the agents itself, and goes the same way. A job that was cancelled is left alone.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

from launch.backends.options import Nodes, divide, seconds_of, wrong
from launch.backends.protocol import STARTED_AGAIN_CODE, Job, Outcome, Script, State
from launch.backends.tools import answer, need
from launch.folder import EVENTS_FILE, LOGS_FOLDER

SCRIPT_FILE = "job.sh"
# An agent's log, in the run's folder; Slurm puts the number of the job in.
OUTPUT_FILE = "slurm-%j.txt"
FIRST_PORT, PORTS = 20_000, 20_000
WAITING = frozenset(["PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "CONFIGURING", "SUSPENDED"])
RUNNING = frozenset(["RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED", "RESIZING"])


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What a Slurm cluster is told beside the job; the first row and memory as sbatch takes them.

    grace: seconds before the limit at which the workers are told to save. requeues: how often a job may be started again. nodes: how
    many to spread the ranks over. segment: nodes that must lie in one NVLink domain, where it is not to follow from the mapping; 0 leaves
    it to Slurm. cpus: of every node, which a GPU job has whole. image, mounts: of a container (Slurm's plugin Pyxis). python: the
    interpreter on the nodes. setup: a line of bash before the agents. sbatch: further options, as on its command line.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    memory: str | None = None
    grace: int = 300
    requeues: int = 100
    nodes: int | None = None
    segment: int | None = None
    cpus: int | None = None
    image: str | None = None
    mounts: str | None = None
    python: str | None = None
    setup: str | None = None
    sbatch: str = ""


class SlurmBackend:
    """Submits jobs with sbatch."""

    def __init__(self, options: SlurmOptions) -> None:
        self._options = options

    def refuse(self, job: Job) -> None:
        """Raises RequestError where there is no sbatch here, ConfigError where the options do not fit the job."""
        self.script(job)
        need("sbatch", "slurm", "Run this on a login node of the cluster")

    def script(self, job: Job) -> Script:
        """The batch script. Raises ConfigError where the options do not fit the job."""
        nodes, options = divide(job, self._options.nodes), self._options
        job = replace(job, out=job.out.absolute())
        _check(options, nodes)
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in _directives(options, job, nodes)),
            "set -euo pipefail",
            "",
            *_variables(options, job),
            *_agents(options, job, nodes),
        ]
        return Script(name=SCRIPT_FILE, text="\n".join(lines) + "\n")

    def start(self, job: Job) -> Outcome:
        """Submit the script that lies in the run's folder. Raises RequestError with sbatch's own words."""
        (job.out / LOGS_FOLDER).mkdir(exist_ok=True)
        said = answer(["sbatch", "--parsable", str(job.out / SCRIPT_FILE)])
        # the number, and behind a semicolon the cluster, where there are several
        return Outcome(ended="submitted", job=said.strip().splitlines()[-1].partition(";")[0])

    def state(self, job: str) -> State:
        """What squeue says. Raises RequestError where it does not answer."""
        # asked for all of the user's jobs, since it fails for the number of one that is long gone
        said = answer(["squeue", "--me", "--noheader", "--format=%A %T %r"])
        found = dict(line.strip().split(" ", 1) for line in said.splitlines() if " " in line.strip())
        if job not in found:
            return State(where="gone", words="not in the queue any more")
        state, _, reason = found[job].partition(" ")
        words = state.lower() + (f" ({reason})" if reason not in ("None", "") else "")
        return State(where="running" if state in RUNNING else "waiting" if state in WAITING else "gone", words=words)

    def stop(self, job: str) -> None:
        """Have a running job save and end; take one that waits out of the queue."""
        where = self.state(job).where
        if where == "running":
            answer(["scancel", "--batch", "--signal=USR1", job])
        elif where == "waiting":
            answer(["scancel", job])


def _check(options: SlurmOptions, nodes: Nodes) -> None:
    """Raises ConfigError where options contradict each other."""
    if options.grace < 1:
        raise wrong("grace", options.grace, "must leave the workers some seconds to save", "300", "grace")
    if options.time is not None and seconds_of("time", options.time) <= options.grace:
        rule = f"must be longer than cluster.grace={options.grace} seconds, in which the workers save"
        raise wrong("time", options.time, rule, f"{options.grace // 60 + 60} (minutes)", "time")
    if options.segment and nodes.count % options.segment:
        near = max(number for number in range(1, options.segment + 1) if nodes.count % number == 0)
        raise wrong("segment", options.segment, f"must divide the {nodes.count} nodes", f"{near}, or 0", "segment")
    if options.mounts and not options.image:
        raise wrong("mounts", options.mounts, "is for a container, and there is no cluster.image", "an image", "image")
    try:
        shlex.split(options.sbatch)
    except ValueError as error:
        rule = f"is not quoted as on a command line ({error})"
        raise wrong("sbatch", options.sbatch, rule, "--comment='two words'", "quotes") from None


def _directives(options: SlurmOptions, job: Job, nodes: Nodes) -> Iterator[str]:
    output = str(job.out / LOGS_FOLDER).replace("%", "%%") + f"/{OUTPUT_FILE}"
    yield f"--job-name={_quoted(job_name(job))}"
    yield f"--output={_quoted(output)}"
    yield "--open-mode=append"
    yield f"--nodes={nodes.count}"
    yield "--ntasks-per-node=1"
    if job.cuda:
        yield f"--gpus-per-node={nodes.ranks}"
        yield "--exclusive"
    if options.cpus or not job.cuda:
        yield f"--cpus-per-task={options.cpus or nodes.ranks}"
    if options.memory or job.cuda:
        yield f"--mem={options.memory or 0}"
    segment = nodes.segment if options.segment is None else options.segment
    if segment:
        yield f"--segment={segment}"
    named = {
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "time": options.time,
        "reservation": options.reservation,
        "constraint": options.constraint,
    }
    yield from (f"--{name}={_quoted(value)}" for name, value in named.items() if value is not None)
    yield f"--signal=B:USR1@{options.grace}"
    yield "--requeue"
    for word in shlex.split(options.sbatch):
        yield _quoted(word)


def _variables(options: SlurmOptions, job: Job) -> Iterator[str]:
    code = shlex.quote(str(job.code))
    yield f"run={shlex.quote(str(job.out))}"
    yield f'export PYTHONPATH={code}"${{PYTHONPATH:+:$PYTHONPATH}}"'
    for name, value, why in job.environment:
        yield f"export {name}={shlex.quote(value)}  # {why}" if why else f"export {name}={shlex.quote(value)}"
    if options.setup:
        yield options.setup
    yield ""


def _agents(options: SlurmOptions, job: Job, nodes: Nodes) -> Iterator[str]:
    """Starting the agents, waiting for them through signals, and having the job started again."""
    python = options.python or ("python3" if options.image else job.python)
    container = [f"--container-image={options.image}"] if options.image else []
    container += [f"--container-mounts={options.mounts}"] if options.mounts else []
    srun = ["srun", f"--nodes={nodes.count}", f"--ntasks={nodes.count}", "--ntasks-per-node=1", "--cpu-bind=none"]
    srun += ["--kill-on-bad-exit=1", *container, python, "-P", "-m", "launch.agent"]
    restarts = f" --restarts {job.restarts}" if job.restarts else ""
    yield from f"""\
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
meeting="$first:$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))"
agents=
passed=0

again() {{  # the job is started again, unless it was cancelled or has been started too often
    if [ "$(squeue --noheader --job="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
        if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {options.requeues} ]; then
            printf '{{"time": %s, "event": "requeued", "job": "%s"}}\\n' "$(date +%s.%N)" "$SLURM_JOB_ID" >> "$run"/{EVENTS_FILE}
            scontrol requeue "$SLURM_JOB_ID"
        else
            echo "started again {options.requeues} times already (--cluster requeues=N allows more)" >&2
        fi
    fi
    exit {STARTED_AGAIN_CODE}
}}

pass() {{  # a signal goes to the agents; before there are any, nothing is lost by starting anew
    if [ -z "$agents" ]; then again; fi
    if kill -s "$1" "$agents" 2> /dev/null; then passed=1; fi
}}

trap 'pass USR1' USR1
trap 'pass TERM' TERM

{shlex.join(srun)} "$run" --nodes {nodes.count} --node-variable SLURM_NODEID \\
    --meeting "$meeting" --job "$SLURM_JOB_ID"{restarts} &
agents=$!
code=0
wait "$agents" || code=$?
while [ "$passed" = 1 ]; do  # the wait ended with a signal to this shell, perhaps, and not with the agents
    passed=0
    late=0
    wait "$agents" || late=$?
    if [ "$late" != 127 ]; then code=$late; fi
done
if [ "$code" = {STARTED_AGAIN_CODE} ]; then again; fi
exit "$code\"""".splitlines()


def job_name(job: Job) -> str:
    """The run folder's name, with what no name of a job may hold replaced."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", job.out.name).strip("-.") or "run"


def _quoted(word: str) -> str:
    """A word as sbatch reads it in a directive: as in a shell."""
    return shlex.quote(word)
