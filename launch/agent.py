"""One node of a job on a cluster: starts this node's ranks, waits for them, and says by its exit code what is to be done.

Started as `python -m launch.agent RUN --nodes N …` by a cluster's script, once on every node. Exit codes: 0 the run has come to its end, or
was told to stop by its user; 75 the workers have saved and the job is to be started again; 1 the job failed; 2 the request was wrong.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from ckpt.command import run_command
from core.errors import RequestError, ZooError
from launch.backends.local import LocalBackend, Node
from launch.backends.protocol import STARTED_AGAIN_CODE, Job, JobError, Outcome
from launch.ending import end_run, fail_run, last_step
from launch.folder import ERRORS_FOLDER, STOP_FILE, note_event, read_json, read_run, write_json


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--nodes", type=click.IntRange(min=1), default=1, help="How many nodes the job has.")
@click.option("--node-variable", metavar="NAME", help="The environment variable with this node's number.")
@click.option("--meeting", default="localhost:0", metavar="HOST:PORT", help="Where agents meet, on node 0.")
@click.option("--job", default="", help="The job's name on the cluster.")
@click.option(
    "--restarts", type=click.IntRange(min=0), default=0, help="How often workers start again after a failure."
)
def agent(run: Path, nodes: int, node_variable: str | None, meeting: str, job: str, restarts: int) -> int:
    """Start this node's ranks of the run in folder RUN, and wait for them."""
    node = Node(number=_number(node_variable), nodes=nodes, meeting=meeting)
    begun, since = time.monotonic(), time.time()
    first = node.number == 0
    file = read_run(run)
    failed = run / ERRORS_FOLDER / f"node{node.number}.json"
    failed.unlink(missing_ok=True)
    if first:
        note_event(run, "started", job=job, nodes=nodes, after_step=last_step(run))
    try:
        outcome = _start(Job(ranks=file.run.ranks, out=run, restarts=restarts), node)
    except JobError as error:
        write_json(failed, {"node": node.number, "time": time.time(), "message": str(error)})
        if first:
            fail_run(run, time.monotonic() - begun, str(error))
        raise
    if outcome.ended == "stopped" and failed_elsewhere(run, since):
        # Slurm ends the other nodes when one fails.
        raise JobError("stopped because another node failed")
    again = outcome.ended == "stopped" and not (run / STOP_FILE).exists()
    if first:
        end_run(run, outcome.ended, time.monotonic() - begun, report=not again)
    return STARTED_AGAIN_CODE if again else 0


def _start(job: Job, node: Node) -> Outcome:
    """Run the workers; signals are ignored from then on, so that this node can write down how it ended while a cluster ends the others.

    Raises JobError also where the nodes do not find each other.
    """
    backend = LocalBackend(node=node, terminal=False, patient=True)
    try:
        return backend.start(job)
    except ZooError:
        raise
    except Exception as error:
        # of torch's agent: an address that no node answers at, a node that is missing
        raise JobError(f"node {node.number}: {type(error).__name__}: {error}") from error


def failed_elsewhere(run: Path, since: float) -> bool:
    """Whether another node has written down that it failed; what an earlier start left is older."""
    return any(read_json(path).get("time", 0.0) >= since for path in (run / ERRORS_FOLDER).glob("node*.json"))


def _number(variable: str | None) -> int:
    if variable is None:
        return 0
    text = os.environ.get(variable, "")
    if not text.isdigit():
        raise RequestError(f"--node-variable {variable}: is {text!r} here, and has to be this node's number.")
    return int(text)


if __name__ == "__main__":
    run_command(agent, "agent", None, interrupted="interrupted")
