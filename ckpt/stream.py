"""Write a checkpoint from any Source in bounded memory, by several processes, going on after a kill where it stopped."""

from __future__ import annotations

import hashlib
import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from ckpt.described import assets_of
from ckpt.dtype import item_bytes
from ckpt.files.address import open_files
from ckpt.files.protocol import Address
from ckpt.host import to_numpy
from ckpt.manifest import Codec
from ckpt.plan import PIECE_BYTES, Held, plan_save
from ckpt.save import Planned, finish
from ckpt.source import Source
from ckpt.store.find import find_store
from ckpt.store.protocol import Written, write_file
from ckpt.target import Target
from core.errors import CheckpointError, ZooError
from core.state.box import Box

# Opens the source, in whichever process needs it: a function and arguments that can be sent to one.
Opener = Callable[[], Source]
# What a process takes for itself, beside the pieces that pass through it.
PROCESS_BYTES = 400 << 20
# Of what is left, how much one piece may be: it is in memory once as it is read and once more where it has to be put in order.
PIECES_IN_MEMORY = 4


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """How to write. memory_bytes: of all processes together. workers: processes."""

    store: str = "zarr"
    codec: Codec = "raw"
    memory_bytes: int = 2 << 30
    workers: int = 1
    overwrite: bool = False

    @property
    def piece_bytes(self) -> int:
        """The most that one process handles at a time. Raises CheckpointError where memory_bytes is too little for anything."""
        room = self.memory_bytes // self.workers - PROCESS_BYTES
        if room < 16 << 20:
            least = self.workers * (PROCESS_BYTES + (16 << 20))
            raise CheckpointError(
                f"memory of {self.memory_bytes:,} bytes: {self.workers} processes need {least:,} at least. "
                "Give more, or fewer workers."
            )
        return min(PIECE_BYTES, room // PIECES_IN_MEMORY)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checkpoint to be written: `held` is what each rank of the readers to come holds (one rank: whatever they are).

    identity: changes whenever what the source holds does, so that two sources are never mixed after a kill.
    """

    opener: Opener
    identity: str
    target: Address
    held: Sequence[Sequence[Held]]
    step: int
    extra: Mapping[str, Any]
    streaming: Streaming


def held_whole(source: Source) -> list[list[Held]]:
    """One rank that holds everything."""
    return [
        [
            Held(
                name=n,
                shape=f.shape,
                dtype=f.dtype,
                box=Box(offset=(0,) * len(f.shape), shape=f.shape),
                copy=0,
                copies=1,
            )
            for n, f in source.forms.items()
        ]
    ]


def write_checkpoint(job: Job, progress: Callable[[int, int], None] | None = None) -> str:
    """Write the checkpoint; its address. progress: called with bytes done and bytes in all.

    What an interrupted writer of the same job has finished is not written again. Raises RequestError where the target is in use,
    CheckpointError where the source is damaged, the target cannot be written, or a process was killed.
    """
    streaming = job.streaming
    plan = plan_save(job.held, streaming.piece_bytes)
    store = find_store(streaming.store)
    planned = Planned(plan=plan, files=store.lay_out(plan), store=store, codec=streaming.codec)
    target = Target(job.target, _fingerprint(job, planned), overwrite=streaming.overwrite)
    free = target.files.free_bytes()
    finished = {written.path: written for written in target.done()}
    if free is not None and free < planned.bytes - sum(w.file.size for w in finished.values()):
        raise CheckpointError(
            f"{job.target}: needs {planned.bytes:,} bytes, {free:,} are free. Make room, or write elsewhere."
        )
    todo = [n for n, file in enumerate(planned.files) if file.path not in finished]
    total, done = max(plan.bytes, 1), sum(written.file.size for written in finished.values())
    for number, written in _written(job, planned, target, todo):
        target.note(number, written)
        finished[written.path] = written
        done += written.file.size
        if progress:
            progress(min(done, total), total)
    described = job.opener().describe()
    manifest = finish(
        target.files.address, job.step, 1, planned, list(finished.values()), job.extra, assets=assets_of(described)
    )
    target.commit(manifest)
    return str(target.address)


def _written(job: Job, planned: Planned, target: Target, todo: list[int]) -> Iterator[tuple[int, Written]]:
    """Every file of `todo` as it is finished, in this process or in several."""
    address = target.files.address
    if job.streaming.workers == 1 or len(todo) < 2:
        source = job.opener()
        for number in todo:
            yield number, _write(source, planned, number, address)
        return
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, BaseProcess] = {}
    try:
        for share in _shares(planned, todo, job.streaming.workers):
            here, there = context.Pipe(duplex=False)
            worker: BaseProcess = context.Process(target=_work, args=(job.opener, planned, address, share, there), daemon=True)
            worker.start()
            there.close()
            workers[here] = worker
        yield from _received(workers, str(job.target))
    finally:
        for worker in workers.values():
            worker.kill()
            worker.join()


def _received(workers: dict[Connection, BaseProcess], target: str) -> Iterator[tuple[int, Written]]:
    """What the workers send, until each has said that it is done."""
    open_ends = dict(workers)
    while open_ends:
        for ready in wait(list(open_ends)):
            assert isinstance(ready, Connection)
            try:
                said = ready.recv()
            except EOFError:
                raise CheckpointError(
                    f"{target}: a worker process was killed (out of memory?). Run the same command again: what is finished "
                    "is kept."
                ) from None
            if said is None:
                del open_ends[ready]
            elif isinstance(said, str):
                raise CheckpointError(said)
            else:
                yield said


def _shares(planned: Planned, todo: list[int], workers: int) -> list[list[int]]:
    """The files of each worker, about as many bytes each."""
    size = {
        n: sum(w.box.elements * item_bytes(planned.plan.tensors[w.name][1]) for w in planned.files[n].writes)
        for n in todo
    }
    shares: list[list[int]] = [[] for _ in range(min(workers, len(todo)))]
    load = [0] * len(shares)
    for number in sorted(todo, key=lambda n: -size[n]):
        least = load.index(min(load))
        shares[least].append(number)
        load[least] += size[number]
    return [sorted(share) for share in shares]


def _work(opener: Opener, planned: Planned, address: str, numbers: list[int], answers: Connection) -> None:
    """A worker process: write files, and send what was written of each, an error as its text, and None at the end."""
    torch.set_num_threads(1)
    try:
        source = opener()
        for number in numbers:
            answers.send((number, _write(source, planned, number, address)))
    except ZooError as error:
        answers.send(str(error))
        return
    except Exception:
        answers.send(traceback.format_exc())
        return
    answers.send(None)


def _write(source: Source, planned: Planned, number: int, address: str) -> Written:
    def read(name: str, box: Box) -> np.ndarray:
        return to_numpy(source.read(name, box))

    files = open_files(address)
    try:
        return write_file(planned.store, planned.plan, planned.files[number], planned.codec, read, files.write)
    except OSError as error:
        raise CheckpointError(f"{error.filename or address}: cannot be written: {error.strerror or error}") from error


def _fingerprint(job: Job, planned: Planned) -> str:
    """What tells this job from any other: all that decides what its files hold."""
    told = (planned.plan.tensors, planned.plan.writes, planned.store.name, planned.codec, job.step, job.identity)
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()
