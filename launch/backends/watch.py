"""Sees the workers of this node die, hands signals on to them, and kills what outlives a failure."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import click

from launch.backends.failures import Death

# USR1 is how a cluster announces that the time of a job is nearly over.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
WATCH_SECONDS = 0.05


class Watch:
    """Sees each worker's death as it happens, hands signals on, and kills what outlives a failure.

    Signal handlers only take notes; a thread acts on them, because a handler may run in the middle of starting a worker.
    patient: however often it is asked to stop, it never kills (on a cluster, whoever wants that does it).
    """

    def __init__(self, grace_seconds: float, *, patient: bool = False) -> None:
        self._pids: Callable[[], dict[int, int]] = dict
        self._grace_seconds = grace_seconds
        self._patient = patient
        self._seen: dict[int, Death] = {}
        self._unknown: dict[int, float] = {}
        self._killed: set[int] = set()
        self._earlier: frozenset[int] = frozenset()
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

    def forget(self) -> None:
        """Begin anew with the workers that come: all there were have ended."""
        self._earlier = frozenset(self._pids().values())
        self._seen, self._unknown, self._killed = {}, {}, set()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals; the handlers of before afterwards. One that is patient leaves them ignored: a late one is no reason to die."""
        before = {number: signal.signal(number, self._note_signal) for number in STOP_SIGNALS}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._note_child)
        before[signal.SIGQUIT] = signal.getsignal(signal.SIGQUIT)
        try:
            yield
        finally:
            for number, handler in before.items():
                late = self._patient and number in STOP_SIGNALS
                signal.signal(number, signal.SIG_IGN if late else handler)

    def run(self, agent: Any) -> Any:
        """Run the agent to its end, and a thread that acts on what is seen."""
        self._pids = partial(_pids, agent)
        thread = threading.Thread(target=self._act, name="watch", daemon=True)
        thread.start()
        try:
            return agent.run()
        finally:
            self._over.set()
            thread.join()
            self._pids = dict

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1

    def _note_child(self, number: int, frame: FrameType | None) -> None:
        self._look()

    def _alive(self) -> dict[int, int]:
        """The process of each rank that was started since the last `forget`."""
        return {rank: pid for rank, pid in self._pids().items() if pid not in self._earlier}

    def _look(self) -> None:
        """Note who died, and leave reaping to the agent."""
        for rank, pid in self._alive().items():
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
            pids = self._alive()
            if self._signals > self._told and pids and not (self._patient and self._told):
                self._told += 1
                if self._told == 1:
                    again = "" if self._patient else " (once more kills them)"
                    click.echo(f"stopping: the workers save a checkpoint first{again}", err=True)
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


def _pids(agent: Any) -> dict[int, int]:
    """The process of each rank, as far as they are started."""
    workers = agent.get_worker_group().workers
    return {worker.global_rank: worker.id for worker in workers if isinstance(worker.id, int)}
