"""Runs a job on this machine: one process a rank, under torchrun's own elastic agent in this process.

Signals. Workers are in sessions of their own, so that a Ctrl-C in the terminal reaches the launcher alone. The first SIGINT,
SIGTERM or SIGHUP is handed to the workers as one SIGTERM, and they are given all the time they need to save and to end by
themselves; a second one kills them. The agent's own handlers, which would end the workers after a fixed time, are not used.

Crashes. When a rank fails, the agent asks the others to end. They may wait in a collective for the dead one, so what is left
after a few seconds is killed.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import click

import launch
from launch.backends.failures import Death, find_failures, job_error, remove_error_files
from launch.backends.protocol import Job, JobError, Outcome
from launch.folder import LOGS_FOLDER

WORKER_MODULE = "launch.worker"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# How long the others get to notice that a rank is gone and to write their own error down.
GRACE_SECONDS = 5.0
WATCH_SECONDS = 0.05


class LocalBackend:
    """Starts the ranks of a job as `python -m <worker_module> <out>` on this machine."""

    def __init__(self, worker_module: str = WORKER_MODULE, grace_seconds: float = GRACE_SECONDS) -> None:
        self._worker_module = worker_module
        self._grace_seconds = grace_seconds

    def start(self, job: Job) -> Outcome:
        """Start the workers and wait for all of them; to be called in the main thread, which receives the signals.

        Rank 0 keeps the terminal for what it prints; everything else goes to `logs/start{n}/`.
        Raises JobError where a rank fails or the workers had to be killed.
        """
        remove_error_files(job.out)
        logs = _new_log_folder(job.out)
        watch = Watch(self._grace_seconds)
        with _environment(_worker_environment(job.ranks)), _quiet_agent():
            result = watch.run(self._agent(job, logs))
        codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
        failures = find_failures(job.out, watch.deaths(codes))
        if watch.killed_by_user:
            raise JobError("killed by a second interrupt; what was not saved before is lost")
        if not result.is_failed():
            return Outcome(ended="stopped" if watch.stop_asked else "finished")
        if watch.stop_asked and failures and failures[0].code == -signal.SIGTERM and failures[0].message is None:
            # the signal came before the workers were ready to save: nothing has been trained in this start
            return Outcome(ended="stopped")
        raise job_error(failures, logs) if failures else JobError(f"the workers failed; their logs: {logs}")

    def _agent(self, job: Job, logs: Path) -> Any:
        """torchrun's agent for the job. torch is imported here, when a job is started and not before."""
        from torch.distributed.elastic.agent.server.api import WorkerSpec
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous import registry as rendezvous

        parameters = RendezvousParameters(
            backend="c10d",
            endpoint="localhost:0",
            run_id=uuid.uuid4().hex,
            min_nodes=1,
            max_nodes=1,
            local_addr="localhost",
        )
        spec = WorkerSpec(
            role="worker",
            local_world_size=job.ranks,
            rdzv_handler=rendezvous.get_rendezvous_handler(parameters),
            entrypoint=sys.executable,
            args=("-P", "-u", "-m", self._worker_module, str(job.out)),
            max_restarts=0,
            monitor_interval=0.1,
            local_addr="localhost",
        )
        return LocalElasticAgent(spec, logs_specs=LogFiles(logs), start_method="spawn")  # type: ignore[arg-type]


class Watch:
    """Sees each worker's death as it happens, hands signals on, and kills what outlives a failure.

    Signal handlers only take notes; a thread acts on them, because a handler may run in the middle of starting a worker.
    """

    def __init__(self, grace_seconds: float) -> None:
        self._pids: Callable[[], dict[int, int]] = dict
        self._grace_seconds = grace_seconds
        self._seen: dict[int, Death] = {}
        self._unknown: dict[int, float] = {}
        self._killed: set[int] = set()
        self._signals = 0
        self._told = 0
        self._over = threading.Event()

    @property
    def stop_asked(self) -> bool:
        """Whether the user asked to stop."""
        return self._signals > 0

    @property
    def killed_by_user(self) -> bool:
        """Whether workers were killed because the user asked a second time."""
        return self._told > 1

    def deaths(self, codes: dict[int, int]) -> tuple[Death, ...]:
        """Every death seen, in order; `codes` (of the agent) fill in those that it saw before us."""
        late = (Death(rank=r, code=codes.get(r, 0), seen=t) for r, t in self._unknown.items() if r not in self._seen)
        missed = (
            Death(rank=rank, code=code, seen=time.time())
            for rank, code in codes.items()
            if rank not in self._seen and rank not in self._unknown
        )
        return tuple(sorted((*self._seen.values(), *late, *missed), key=lambda death: death.seen))

    def run(self, agent: Any) -> Any:
        """Run the agent to its end, handlers and thread in place; the handlers of before afterwards."""
        before = {number: signal.signal(number, self._note_signal) for number in STOP_SIGNALS}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._note_child)
        before[signal.SIGQUIT] = signal.getsignal(signal.SIGQUIT)
        self._pids = partial(_pids, agent)
        thread = threading.Thread(target=self._act, name="watch", daemon=True)
        thread.start()
        try:
            return agent.run()
        finally:
            self._over.set()
            thread.join()
            for number, handler in before.items():
                signal.signal(number, handler)
            self._pids = dict

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1

    def _note_child(self, number: int, frame: FrameType | None) -> None:
        self._look()

    def _look(self) -> None:
        """Note who died, and leave reaping to the agent."""
        for rank, pid in self._pids().items():
            if rank in self._seen or rank in self._unknown:
                continue
            try:
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                # the agent has reaped it already and knows the code
                self._unknown[rank] = time.time()
                continue
            if ended is not None:
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                self._seen[rank] = Death(rank=rank, code=code, seen=time.time(), ours=rank in self._killed)

    def _act(self) -> None:
        while not self._over.wait(WATCH_SECONDS):
            self._look()
            pids = self._pids()
            if self._signals > self._told and pids:
                self._told += 1
                if self._told == 1:
                    click.echo("stopping: the workers save a checkpoint first (once more kills them)", err=True)
                self._send(pids, signal.SIGTERM if self._told == 1 else signal.SIGKILL)
            failed = [death.seen for death in self._seen.values() if death.code != 0]
            if failed and time.time() - min(failed) > self._grace_seconds:
                self._send(pids, signal.SIGKILL)

    def _send(self, pids: dict[int, int], number: signal.Signals) -> None:
        for rank, pid in pids.items():
            if rank in self._seen or rank in self._unknown or rank in self._killed:
                continue
            if number == signal.SIGKILL:
                self._killed.add(rank)
            with contextlib.suppress(ProcessLookupError):
                # a worker leads its own process group
                os.killpg(pid, number) if number == signal.SIGKILL else os.kill(pid, number)


class LogFiles:
    """Rank 0's standard output stays on the terminal; all other output goes to one file a rank and stream.

    Has what the agent uses of torch's LogsSpecs, without its base class, which would need torch to load.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def root_log_dir(self) -> str:
        """The folder of the files."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> Any:
        """The files of every rank; an empty name is the terminal."""
        from torch.distributed.elastic.multiprocessing import LogsDest

        paths = {rank: self._folder / f"rank{rank}" for rank in envs}
        return LogsDest(
            stdouts={rank: f"{path}.stdout.txt" if rank else "" for rank, path in paths.items()},
            stderrs={rank: f"{path}.stderr.txt" for rank, path in paths.items()},
            error_files={rank: f"{path}.agent.json" for rank, path in paths.items()},
        )


def _pids(agent: Any) -> dict[int, int]:
    """The process of each rank, as far as they are started."""
    workers = agent.get_worker_group().workers
    return {worker.global_rank: worker.id for worker in workers if isinstance(worker.id, int)}


def _new_log_folder(out: Path) -> Path:
    """`logs/start{n}`: every start of a run keeps its own."""
    number = 1 + len(list((out / LOGS_FOLDER).glob("start*")))
    folder = out / LOGS_FOLDER / f"start{number}"
    folder.mkdir(parents=True)
    return folder


def _worker_environment(ranks: int) -> dict[str, str]:
    """What the workers inherit: their share of the cores, and a path that finds this very package from any folder."""
    cores = len(os.sched_getaffinity(0))
    package_root = str(Path(launch.__file__).resolve().parents[1])
    path = os.environ.get("PYTHONPATH")
    return {
        # a value that the user has set wins
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // ranks))),
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
