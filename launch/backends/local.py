"""Runs a job's workers on this machine: one process a rank, under torchrun's own elastic agent in this process.

Alone, or as one of the nodes of a cluster, whose agents meet at an address and start together.

Signals. Workers are in sessions of their own, so that a Ctrl-C in the terminal reaches the launcher alone. The first SIGINT,
SIGTERM, SIGHUP or SIGUSR1 is handed to the workers as one SIGTERM, and they are given all the time they need to save and to end by
themselves; a second one kills them. The agent's own handlers, which would end the workers after a fixed time, are not used.

Crashes. When a rank fails, the agent asks the others to end. They may wait in a collective for the dead one, so what is left
after a few seconds is killed. Where restarts are left, all are started again and go on from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import sys
import time
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

import launch
from core.errors import ConfigError, Fault
from launch.backends.failures import find_failures, job_error, remove_error_files
from launch.backends.protocol import Job, JobError, Outcome, Script, State
from launch.backends.watch import Watch
from launch.folder import ENDS_FOLDER, LOGS_FOLDER, note_event

WORKER_MODULE = "launch.worker"
# How long the others get to notice that a rank is gone and to write their own error down.
GRACE_SECONDS = 5.0
# Nodes of a large job start minutes apart.
MEETING_SECONDS = 1200


@dataclass(frozen=True, kw_only=True)
class Node:
    """One of the nodes of a job: its number, how many there are, and HOST:PORT on the first where their agents meet."""

    number: int = 0
    nodes: int = 1
    meeting: str = "localhost:0"


class StopAskedError(Exception):
    """The user asked to stop while no worker was running."""


class LocalBackend:
    """Starts the ranks of a job, or one node's share of them, as `python -m <worker_module> <out>` on this machine.

    terminal: whether rank 0 keeps it for what it prints. patient: whether a second signal kills nothing.
    """

    def __init__(
        self,
        worker_module: str = WORKER_MODULE,
        grace_seconds: float = GRACE_SECONDS,
        *,
        node: Node | None = None,
        terminal: bool = True,
        patient: bool = False,
    ) -> None:
        self._worker_module = worker_module
        self._grace_seconds = grace_seconds
        self._node = node or Node()
        self._terminal = terminal
        self._patient = patient

    def refuse(self, job: Job) -> None:
        """Raises ConfigError where the ranks need more GPUs than there are here."""
        if job.cuda:
            _refuse_missing_devices(job.ranks)

    def script(self, job: Job) -> Script | None:
        """Nothing is submitted."""
        return None

    def start(self, job: Job) -> Outcome:
        """Start the workers and wait for all of them; to be called in the main thread, which receives the signals.

        Rank 0 keeps the terminal for what it prints; everything else goes to `logs/start{n}/`, where each start after a failure has its
        own. Raises JobError where a rank fails with no restart left, or the workers had to be killed.
        """
        remove_error_files(job.out)
        watch = Watch(self._grace_seconds, patient=self._patient)
        starts = Starts(job, self._node, watch)
        with watch.listening(), _environment(_worker_environment(job, self._node)), _quiet_agent():
            try:
                result = watch.run(self._agent(job, starts))
            except StopAskedError:
                return Outcome(ended="stopped")
        codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
        deaths = watch.deaths(codes)
        failures = find_failures(job.out, deaths, since=starts.begun)
        if watch.killed_by_user:
            raise JobError("killed by a second interrupt; what was not saved before is lost")
        if not result.is_failed():
            return Outcome(ended=_ended(job, self._node, watch))
        first = next((death for death in deaths if death.code), None)
        if watch.stop_asked and first and -first.code in (signal.SIGTERM, signal.SIGUSR1):
            # the signal came before the workers were ready to save: nothing has been trained in this start
            return Outcome(ended="stopped")
        raise job_error(failures, starts.logs) if failures else JobError(f"the workers failed; logs: {starts.logs}")

    def state(self, job: str) -> State:
        """Whether the launcher of that name (`this_process`) still runs here."""
        runs = _name(job.partition("@")[0]) == job
        return State(where="running" if runs else "gone", words="running" if runs else "ended")

    def stop(self, job: str) -> None:
        """Ask the launcher of that name to stop."""
        if self.state(job).where == "running":
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(job.partition("@")[0]), signal.SIGTERM)

    def _agent(self, job: Job, starts: Starts) -> Any:
        """torchrun's agent for the job. torch is imported here, when a job is started and not before."""
        from torch.distributed.elastic.agent.server.api import WorkerSpec
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous import registry as rendezvous

        node = self._node
        address = "localhost" if node.nodes == 1 else None
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=node.meeting,
            run_id=uuid.uuid4().hex if node.nodes == 1 else "run",
            min_nodes=node.nodes,
            max_nodes=node.nodes,
            local_addr=address,
            # whose names are those of a cluster need not be the machines' own
            is_host=node.number == 0,
            read_timeout=MEETING_SECONDS,
            join_timeout=MEETING_SECONDS,
        )
        starts.meet(rendezvous.get_rendezvous_handler(parameters))
        spec = WorkerSpec(
            role="worker",
            local_world_size=job.ranks // node.nodes,
            rdzv_handler=starts,  # type: ignore[arg-type]
            entrypoint=sys.executable,
            args=("-P", "-u", "-m", self._worker_module, str(job.out)),
            max_restarts=job.restarts,
            monitor_interval=0.1,
            local_addr=address,
        )
        logs = LogFiles(starts, terminal=self._terminal)
        return LocalElasticAgent(spec, logs_specs=logs, start_method="spawn")  # type: ignore[arg-type]


class Starts:
    """torchrun's rendezvous, which every start of the workers goes through: the first, and one after every failure.

    Beside what it does, it numbers ranks by the nodes' numbers (torch would sort host names, in which 10 comes before 2), and gives every
    start a folder of logs, the same on all nodes.
    """

    def __init__(self, job: Job, node: Node, watch: Watch) -> None:
        self._job, self._node, self._watch = job, node, watch
        self._handler: Any = None
        self._count = 0
        self.begun = 0.0
        self.logs = Path()

    def meet(self, handler: Any) -> None:
        """Let `handler`, torch's own, do the work."""
        self._handler = handler

    def next_rendezvous(self) -> Any:
        """Wait for all nodes. Raises StopAskedError where the user has asked to stop after the workers had failed."""
        from torch.distributed.elastic.rendezvous.api import RendezvousInfo

        if self._count:
            self._tell_failure()
            if self._watch.stop_asked:
                raise StopAskedError
        self._count += 1
        self._watch.forget()
        _first_end(self._job, self._node).unlink(missing_ok=True)
        found = self._handler.next_rendezvous()
        self.logs = self._log_folder(found.store)
        self.begun = time.time()
        return RendezvousInfo(found.store, self._node.number, found.world_size, found.bootstrap_store_info)

    def _tell_failure(self) -> None:
        """What ended the start before, for the terminal and events.jsonl."""
        failures = find_failures(self._job.out, self._watch.deaths({}), since=self.begun)
        said = str(job_error(failures, self.logs)) if failures else "workers of another node failed"
        click.echo(f"{said}\nstarting again from the last checkpoint (restart {self._count})", err=True)
        remove_error_files(self._job.out)
        if self._node.number == 0:
            note_event(self._job.out, "restarted", restart=self._count, because=said.splitlines()[0])

    def _log_folder(self, store: Any) -> Path:
        """`logs/start{n}`: every start of a run keeps its own. The first node says the number."""
        if self._node.number == 0:
            folder = _new_log_folder(self._job.out)
            store.set("logs", folder.name)
            return folder
        return self._job.out / LOGS_FOLDER / str(store.get("logs").decode())

    @property
    def use_agent_store(self) -> bool:
        """As torch has it."""
        return bool(self._handler.use_agent_store)

    def get_backend(self) -> str:
        """As torch has it."""
        return str(self._handler.get_backend())

    def get_run_id(self) -> str:
        """As torch has it."""
        return str(self._handler.get_run_id())

    def is_closed(self) -> bool:
        """As torch has it."""
        return bool(self._handler.is_closed())

    def set_closed(self) -> None:
        """As torch has it."""
        self._handler.set_closed()

    def num_nodes_waiting(self) -> int:
        """As torch has it."""
        return int(self._handler.num_nodes_waiting())

    def shutdown(self) -> bool:
        """As torch has it."""
        return bool(self._handler.shutdown())


class LogFiles:
    """All output goes to one file a rank and stream; where there is a terminal, what rank 0 prints stays on it.

    Has what the agent uses of torch's LogsSpecs, without its base class, which would need torch to load.
    """

    def __init__(self, starts: Starts, *, terminal: bool) -> None:
        self._starts = starts
        self._terminal = terminal

    @property
    def root_log_dir(self) -> str:
        """The folder of the files."""
        return str(self._starts.logs)

    def reify(self, envs: dict[int, dict[str, str]]) -> Any:
        """The files of every rank of this node; an empty name is the terminal."""
        from torch.distributed.elastic.multiprocessing import LogsDest

        ranks = {local: int(env["RANK"]) for local, env in envs.items()}
        paths = {local: self._starts.logs / f"rank{rank}" for local, rank in ranks.items()}
        shown = {local for local, rank in ranks.items() if rank == 0 and self._terminal}
        return LogsDest(
            stdouts={local: "" if local in shown else f"{path}.stdout.txt" for local, path in paths.items()},
            stderrs={local: f"{path}.stderr.txt" for local, path in paths.items()},
            error_files={local: f"{path}.agent.json" for local, path in paths.items()},
        )


def _first_end(job: Job, node: Node) -> Path:
    """Where this node's first rank writes how far it came."""
    return job.out / ENDS_FOLDER / f"rank{node.number * (job.ranks // node.nodes)}.json"


def _ended(job: Job, node: Node, watch: Watch) -> Any:
    """Whether the run came to its last step; a stop that another node was asked for ends the workers here too."""
    try:
        end = json.loads(_first_end(job, node).read_text(encoding="utf-8"))
        return "finished" if end["step"] >= end["steps"] else "stopped"
    except (OSError, ValueError, KeyError):
        return "stopped" if watch.stop_asked else "finished"


def this_process() -> str:
    """A name of this process that no other has, later ones with its number included: the number, and when it began."""
    return _name(str(os.getpid()))


def _name(pid: str) -> str:
    """The name of the process with that number; empty where there is none, or where it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return ""
    # the name of the program, in brackets, may hold anything; the state and, 19 fields on, the begin follow it
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state == "Z" else f"{pid}@{fields[18]}"


def _refuse_missing_devices(ranks: int) -> None:
    import torch

    there = torch.cuda.device_count()
    if there < ranks:
        rule = f"each rank needs a CUDA device, and torch sees {there} here"
        works = f"{f'1 to {there}' if there else '--hw cpu'}, or --backend slurm, kubernetes or print"
        raise ConfigError([Fault(setting="--ranks", value=ranks, rule=rule, works=works)])


def _new_log_folder(out: Path) -> Path:
    """`logs/start{n}`: every start of a run keeps its own."""
    number = 1 + len(list((out / LOGS_FOLDER).glob("start*")))
    folder = out / LOGS_FOLDER / f"start{number}"
    folder.mkdir(parents=True)
    return folder


def _worker_environment(job: Job, node: Node) -> dict[str, str]:
    """What the workers inherit: their share of the cores, and a path that finds this very package from any folder."""
    cores = len(os.sched_getaffinity(0))
    package_root = str(Path(launch.__file__).resolve().parents[1])
    path = os.environ.get("PYTHONPATH")
    ours = {
        "OMP_NUM_THREADS": str(max(1, cores * node.nodes // job.ranks)),
        **{name: value for name, value, _ in job.environment},
    }
    return {
        # a value that the user has set wins
        **{name: os.environ.get(name, value) for name, value in ours.items()},
        "PYTHONPATH": f"{package_root}{os.pathsep}{path}" if path else package_root,
        # the agent must install a handler for something; stopping is ours
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",
    }


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """The agent hands this process's environment on: set it while the workers are started, then put it back."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """What the agent logs about a failed worker says less than the worker's own error, which we show."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # the agent never closes the log files of workers that ended by themselves
            warnings.simplefilter("ignore", ResourceWarning)
            yield
            gc.collect()
    finally:
        logging.disable(before)
