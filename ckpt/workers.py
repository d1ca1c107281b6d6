"""Processes that share a job, and end with the one that started them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from ckpt.memory import keep_freed_memory
from core.errors import CheckpointError, ZooError

# work(share, say): does its share and says whatever it has to say, all of which can be sent to another process.
Work = Callable[[Sequence[int], Callable[[Any], None]], None]
PR_SET_PDEATHSIG = 1


def share_out(work: Work, shares: Sequence[Sequence[int]], hear: Callable[[Any], None], what: str) -> None:
    """Run `work` on every share in a process of its own, a single one in this; what they say is heard here, one word after the other.

    Raises CheckpointError, about `what`, where one of them fails or is killed; the others are then killed too.
    """
    if len(shares) < 2:
        with _one_thread():
            work([n for share in shares for n in share], hear)
        return
    context = multiprocessing.get_context("spawn")
    running: dict[Connection, BaseProcess] = {}
    try:
        for share in shares:
            here, there = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(target=_work, args=(work, share, os.getpid(), there), daemon=True)
            process.start()
            there.close()
            running[here] = process
        _hear_all(list(running), hear, what)
    finally:
        for process in running.values():
            process.kill()
            process.join()


def shares(sizes: Sequence[int], workers: int) -> list[list[int]]:
    """The numbers of all things, dealt to at most `workers` shares of about equal size, the largest first; in each they ascend."""
    dealt: list[list[int]] = [[] for _ in range(max(1, min(workers, len(sizes))))]
    load = [0] * len(dealt)
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        least = load.index(min(load))
        dealt[least].append(number)
        load[least] += sizes[number]
    return [sorted(share) for share in dealt]


def _hear_all(ends: list[Connection], hear: Callable[[Any], None], what: str) -> None:
    """Hear the workers until each has said that it is done."""
    while ends:
        for ready in wait(ends):
            assert isinstance(ready, Connection)
            try:
                kind, said = ready.recv()
            except EOFError:
                raise CheckpointError(
                    f"{what}: a worker process was killed (out of memory?). Run the same command again: what is finished is kept."
                ) from None
            if kind == "failed":
                raise CheckpointError(said)
            if kind == "done":
                ends.remove(ready)
            else:
                hear(said)


@contextmanager
def _one_thread() -> Iterator[None]:
    """What torch computes is little beside reading and writing, which go on at once: threads that wait for it take their processor."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _work(work: Work, share: Sequence[int], parent: int, out: Connection) -> None:
    """A process: send ("said", …) as the work says something, and at the end ("done", None) or ("failed", why)."""
    _end_with(parent)
    keep_freed_memory()
    torch.set_num_threads(1)
    try:
        work(share, lambda said: out.send(("said", said)))
    except BrokenPipeError:
        return
    except (ZooError, OSError) as error:
        where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        out.send(("failed", f"{where}{error}" if isinstance(error, ZooError) else f"{where}{error.strerror or error}"))
    except Exception:
        out.send(("failed", traceback.format_exc()))
    else:
        out.send(("done", None))


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, so that a killed writer leaves nobody who writes on (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
