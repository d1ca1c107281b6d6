"""One pool of started gloo ranks for the whole test suite: a test sends a module-level function to some of them.

The ranks are forked from a server that has imported torch once, so that starting (or restarting) them takes a fraction of
a second; only as many are started as the largest run so far has asked for. Every run gets a default process group of its own,
of exactly as many ranks as it asks for.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LARGEST_WORLD = 8
ROOT = Path(__file__).resolve().parent.parent
GRACE_SECONDS = 1.0  # what the other ranks get to report once one has failed; they usually hang in a collective
STACK_SECONDS = 2.0  # what a hanging rank gets to write its stack
LOG_TAIL = 2000  # characters of a dead rank's output that are shown


class RanksFailedError(Exception):
    """A run that did not give a result on every rank. `ranks` are those that raised, died or hung, first failure first."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class RankRaisedError(RanksFailedError):
    """A rank raised an exception; the message holds its traceback."""


class RankDiedError(RanksFailedError):
    """A rank's process ended during the run."""


class RanksHungError(RanksFailedError):
    """Some ranks did not answer in time; the message holds their Python stacks."""


@dataclass
class _Worker:
    process: Any
    connection: Connection
    log: Path

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_TAIL:]


@dataclass
class _Answers:
    results: dict[int, bytes] = field(default_factory=dict)
    raised: dict[int, str] = field(default_factory=dict)
    died: list[int] = field(default_factory=list)


class Ranks:
    """The pool. Ranks start when a run first needs them and are kept; after a failure all of them are replaced by new ones."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._folder: Path | None = None
        self._runs = 0

    def run(self, function: Callable[..., Any], world: int, *args: Any, timeout_seconds: float = 30.0) -> list[Any]:
        """The results of `function(rank, world, *args)` on `world` ranks, by rank; torch.distributed is initialised there.

        `function` is defined at the top of a module. Arguments and results are pickled, tensors as detached CPU tensors.
        Raises RankRaisedError, RankDiedError, or RanksHungError after `timeout_seconds`; the pool is then replaced.
        """
        if not 1 <= world <= LARGEST_WORLD:
            raise ValueError(f"world={world}: the pool has ranks for worlds of 1 to {LARGEST_WORLD}")
        if "." in function.__qualname__:
            raise ValueError(
                f"{function.__qualname__} must be defined at the top of its module to be sent to the ranks"
            )
        self._start(world)
        assert self._folder is not None
        self._runs += 1
        task = (function.__module__, function.__code__.co_filename, function.__name__, world, timeout_seconds)
        message = pickle.dumps((task, str(self._folder / f"store-{self._runs}"), dumps(args)))
        workers = self._workers[:world]
        try:
            for worker in workers:
                worker.connection.send_bytes(message)
            answers = self._collect(workers, timeout_seconds)
            for worker in workers:  # only now, so that no rank closes its sockets while another still reads from them
                worker.connection.send_bytes(b"end")
        except BaseException:
            self.close()
            raise
        return [pickle.loads(answers.results[rank]) for rank in range(world)]

    def close(self) -> None:
        """End every rank. A later run starts new ones."""
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
        self._workers = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self, world: int) -> None:
        """Start the ranks of a world of this size that are not there yet."""
        if len(self._workers) >= world:
            return
        context = multiprocessing.get_context("forkserver")
        # The last two are what torch imports with the first optimizer and with FSDP, two seconds of work.
        context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "torch.distributed.fsdp"])
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        for rank in range(len(self._workers), world):
            here, there = context.Pipe()
            log = self._folder / f"rank-{rank}.log"
            process = context.Process(target=_serve, args=(rank, there, str(log), str(ROOT)), daemon=True)
            process.start()
            there.close()
            self._workers.append(_Worker(process=process, connection=here, log=log))

    def _collect(self, workers: list[_Worker], timeout_seconds: float) -> _Answers:
        """Every rank's result. Raises as `run` says; once a rank has failed, the others get GRACE_SECONDS."""
        answers = _Answers()
        pending = {worker.connection: rank for rank, worker in enumerate(workers)}
        end = time.monotonic() + timeout_seconds
        while pending:
            ready = wait(list(pending), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                _receive(connection, pending.pop(connection), answers)
            if answers.raised or answers.died:
                end = min(end, time.monotonic() + GRACE_SECONDS)
        if answers.died:
            raise RankDiedError(_describe_deaths(workers, answers), answers.died)
        if answers.raised:
            told = [
                f"rank {rank} raised, in a world of {len(workers)}:\n{text}" for rank, text in answers.raised.items()
            ]
            raise RankRaisedError("\n".join(told), list(answers.raised))
        if pending:
            late = sorted(pending.values())
            raise RanksHungError(_describe_hang(workers, late, timeout_seconds), late)
        return answers


def dumps(value: Any) -> bytes:
    """`value` pickled, tensors as plain bytes: no shared memory, no file descriptors, no graph."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        import torch

        if not isinstance(value, torch.Tensor):
            return NotImplemented
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return _tensor, (flat.numpy().tobytes(), str(value.dtype).removeprefix("torch."), tuple(value.shape))


def _tensor(content: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    if not content:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype)).reshape(shape)


def _receive(connection: Connection, rank: int, answers: _Answers) -> None:
    """Sort one rank's answer into `answers`; a closed connection means that its process has ended."""
    try:
        done, content = pickle.loads(connection.recv_bytes())
    except (EOFError, OSError):
        answers.died.append(rank)
        return
    if done:
        answers.results[rank] = content
    else:
        answers.raised[rank] = content


def _describe_deaths(workers: list[_Worker], answers: _Answers) -> str:
    lines = []
    for rank in answers.died:
        workers[rank].process.join(GRACE_SECONDS)
        code = workers[rank].process.exitcode
        lines.append(f"rank {rank} died with exit code {code} in a world of {len(workers)}\n{workers[rank].log_text()}")
    lines += [f"rank {rank} raised:\n{text}" for rank, text in answers.raised.items()]
    return "\n".join(lines)


def _describe_hang(workers: list[_Worker], late: list[int], timeout_seconds: float) -> str:
    """Who hangs, and where: each late rank writes its stacks when it gets the signal that faulthandler listens to."""
    lines = [f"ranks {late} of a world of {len(workers)} did not answer within {timeout_seconds:g} s"]
    for rank in late:
        os.kill(workers[rank].process.pid, signal.SIGUSR1)
    end = time.monotonic() + STACK_SECONDS
    while time.monotonic() < end and any("most recent call first" not in workers[r].log_text() for r in late):
        time.sleep(0.02)
    lines += [f"rank {rank}:\n{workers[rank].log_text()}" for rank in late]
    return "\n".join(lines)


def _serve(rank: int, connection: Connection, log: str, root: str) -> None:
    """A worker's life: run what arrives until the pool closes the connection."""
    import torch

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # Not sys.stderr: under a test runner that object may write somewhere else than descriptor 2.
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True)
    faulthandler.enable(file=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the test runner, which ends the ranks
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # a machine without network resolves its own name slowly or not at all
    torch.set_num_threads(1)
    if root not in sys.path:
        sys.path.insert(0, root)
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        if message == b"end":
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            # A process group lives on, with a thread that polls its sockets, for as long as a model's cycle of references holds it.
            gc.collect()
            continue
        connection.send_bytes(_answer(rank, message))


def _answer(rank: int, message: bytes) -> bytes:
    """Whether the task succeeded, with its pickled result or its traceback."""
    try:
        (module, path, name, world, timeout_seconds), store, content = pickle.loads(message)
        function = getattr(_load(module, path), name)
        return pickle.dumps((True, dumps(_run(rank, world, timeout_seconds, store, function, pickle.loads(content)))))
    except BaseException:  # also SystemExit and pytest's outcomes: whatever ends the function is the test's answer
        return pickle.dumps((False, traceback.format_exc()))


def _run(rank: int, world: int, timeout_seconds: float, store: str, function: Callable[..., Any], args: tuple) -> Any:
    import torch.distributed as dist

    # Longer than the pool waits, so that a hang is reported by the pool with every rank's stack, and yet none outlives it.
    timeout = timedelta(seconds=timeout_seconds + 30)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    return function(rank, world, *args)


def _load(name: str, path: str) -> Any:
    """The module of a test function, loaded from its file: test modules need not be importable by name."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"{path} is no Python module"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
