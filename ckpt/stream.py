"""Write a checkpoint from any Source in bounded memory, by several processes, going on after a kill where it stopped."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from ckpt.ahead import ahead
from ckpt.dtype import item_bytes
from ckpt.files.address import open_files
from ckpt.files.protocol import Address, Buffer, Files
from ckpt.files.url import is_remote
from ckpt.manifest import Codec, require_json
from ckpt.memory import memory_of_each
from ckpt.plan import PIECE_BYTES, Held, plan_save
from ckpt.runs import Runs
from ckpt.save import Planned, finish
from ckpt.source import Source
from ckpt.store.find import find_store
from ckpt.store.protocol import Written, write_file
from ckpt.target import Target
from ckpt.workers import share_out, shares
from core.errors import CheckpointError, RequestError
from core.state.box import whole

# Opens the source, in whichever process needs it: a function and arguments that can be sent to one.
Opener = Callable[[], Source]
# Called with the bytes done and in all.
Progress = Callable[[int, int], None]
# What passes through a process: a run of blocks that is being written, one that waits, and one that a source makes, by way of wider types.
RUNS_IN_MEMORY = 10
# Larger ones come in memory that the system has to clear first.
MOST_RUN_BYTES = 16 << 20
# A file is what is written again after a kill, and what one process writes: neither a few huge ones nor a great many.
LEAST_PIECE_BYTES = 64 << 20
FILES_OF_A_LARGE_ONE = 64
# So many bytes are written between two words about them.
TOLD_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """How to write. memory_bytes: of all processes together. workers: processes that write."""

    store: str = "zarr"
    codec: Codec = "raw"
    memory_bytes: int = 2 << 30
    workers: int = 1
    overwrite: bool = False

    def run_bytes(self, *, uploads: bool = False) -> int:
        """How much one process reads at a time. uploads: into an object store. Raises RequestError where memory_bytes is too little."""
        return min(MOST_RUN_BYTES, memory_of_each(self.memory_bytes, self.workers, uploads) // RUNS_IN_MEMORY)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checkpoint to be written: `held` is what each rank of the readers to come holds (one rank: whatever they are).

    identity: changes whenever what the source holds does, so that two sources are never mixed after a kill. assets: files that
    belong to the model, by name.
    """

    opener: Opener
    identity: str
    target: Address
    held: Sequence[Sequence[Held]]
    step: int
    extra: Mapping[str, Any]
    streaming: Streaming
    assets: Mapping[str, bytes] = field(default_factory=dict)


def held_whole(source: Source) -> list[list[Held]]:
    """One rank that holds everything."""
    return [
        [
            Held(name=n, shape=f.shape, dtype=f.dtype, box=whole(f.shape), copy=0, copies=1)
            for n, f in source.forms.items()
        ]
    ]


def plan_job(job: Job) -> Planned:
    """The files that will be written. Raises RequestError for a store, codec or memory that cannot be, and nothing is written."""
    streaming, store = job.streaming, find_store(job.streaming.store)
    if streaming.codec not in store.codecs:
        works = ", ".join(store.codecs)
        raise RequestError(f"--codec={streaming.codec}: the store {store.name} cannot hold it. Works: {works}.")
    remote = is_remote(job.target)
    assert streaming.run_bytes(uploads=remote), "raises where there is too little memory"
    require_json(job.extra)
    total = sum(held.bytes for rank in job.held for held in rank if held.copy == 0)
    # Of what goes into an object store, a file is in memory as a whole.
    most = LEAST_PIECE_BYTES if remote else PIECE_BYTES
    plan = plan_save(job.held, min(most, max(LEAST_PIECE_BYTES, total // FILES_OF_A_LARGE_ONE)))
    return Planned(plan=plan, files=store.lay_out(plan), store=store, codec=streaming.codec, assets=job.assets)


def file_bytes(planned: Planned) -> dict[str, int]:
    """The bytes of values in every planned file."""
    tensors = planned.plan.tensors
    return {f.path: sum(w.box.elements * item_bytes(tensors[w.name][1]) for w in f.writes) for f in planned.files}


def write_checkpoint(job: Job, progress: Progress | None = None) -> str:
    """Write the checkpoint; its address. progress: called with the bytes of values done and in all.

    What an interrupted writer of the same job has finished is not written again. Raises RequestError where the target is in use,
    CheckpointError where the source is damaged, the target cannot be written, or a process was killed.
    """
    planned = plan_job(job)
    with closing(Target(job.target, _fingerprint(job, planned), overwrite=job.streaming.overwrite)) as target:
        try:
            return _write_into(target, job, planned, progress)
        except OSError as error:
            where = error.filename or job.target
            raise CheckpointError(f"{where}: cannot be written: {error.strerror or error}") from error


def _write_into(target: Target, job: Job, planned: Planned, progress: Progress | None) -> str:
    """Write what is not there yet of the files, and what vouches for them."""
    account = _Account(target, planned, progress)
    free = target.files.free_bytes()
    if free is not None and free < planned.bytes - account.done:
        needs = planned.bytes - account.done
        raise CheckpointError(f"{job.target}: needs {needs:,} bytes, {free:,} are free. Make room, or write elsewhere.")
    todo = [n for n, file in enumerate(planned.files) if file.path not in account.finished]
    write = _Writer(job.opener, planned, target.files.address, job.streaming.run_bytes(uploads=target.remote))
    account.tell()
    sizes = file_bytes(planned)
    dealt = shares([sizes[planned.files[n].path] for n in todo], job.streaming.workers)
    share_out(write, [[todo[i] for i in share] for share in dealt], account.take, str(job.target))
    in_order = [account.finished[file.path] for file in planned.files]
    target.commit(finish(target.files.address, job.step, 1, planned, in_order, job.extra))
    return str(target.address)


class _Account:
    """What is finished of the target's files, as those who write them say."""

    def __init__(self, target: Target, planned: Planned, progress: Progress | None) -> None:
        self.target, self.progress, self.total = target, progress, planned.plan.bytes
        sizes = file_bytes(planned)
        self.finished = {written.path: written for written in target.done() if written.path in sizes}
        self.done = sum(sizes[path] for path in self.finished)

    def take(self, said: int | tuple[int, Written]) -> None:
        """Bytes that were written of a file, or the number of a finished one and what became of it."""
        if isinstance(said, int):
            self.done += said
            self.tell()
            return
        number, written = said
        self.target.note(number, written)
        self.finished[written.path] = written

    def tell(self) -> None:
        """Show how far it is."""
        if self.progress:
            self.progress(min(self.done, self.total), self.total)


@dataclass(frozen=True)
class _Writer:
    """Writes planned files, in whichever process it is called; while one is pushed to the disk the next is written."""

    opener: Opener
    planned: Planned
    address: str
    run_bytes: int

    def __call__(self, numbers: Sequence[int], say: Callable[[int | tuple[int, Written]], None]) -> None:
        if not numbers:
            return
        planned, source, files = self.planned, self.opener(), open_files(self.address)
        with closing(_Pushing(files, say)) as pushing:

            def write(path: str, buffers: Iterator[Buffer]) -> int:
                with closing(ahead(buffers, self.run_bytes)) as coming:
                    return files.write(path, _told(coming, pushing.say), push=False)

            for number in numbers:
                file = planned.files[number]
                read = Runs(source, planned.plan, file.writes, self.run_bytes).read
                pushing.push(number, write_file(planned.store, planned.plan, file, planned.codec, read, write))
            pushing.end()


class _Pushing:
    """Pushes one written file at a time to the disk, in a thread; when it is there, its number and what became of it are said."""

    def __init__(self, files: Files, say: Callable[[int | tuple[int, Written]], None]) -> None:
        self._files, self._say = files, say
        self._pool = ThreadPoolExecutor(1)
        self._pushed: Future[tuple[int, Written]] | None = None

    def push(self, number: int, written: Written) -> None:
        """Begin with a file; the one before is on the disk when this returns."""
        self.end()
        self._pushed = self._pool.submit(self._push, number, written)

    def end(self) -> None:
        """Wait for the last file."""
        if self._pushed is not None:
            pushed, self._pushed = self._pushed.result(), None
            self._say(pushed)

    def say(self, taken: int) -> None:
        """Say how many bytes are written, and which file is on the disk by now."""
        if self._pushed is not None and self._pushed.done():
            self.end()
        self._say(taken)

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()

    def _push(self, number: int, written: Written) -> tuple[int, Written]:
        self._files.push(written.path)
        return number, written


def _told(buffers: Iterator[Buffer], say: Callable[[int], None]) -> Iterator[Buffer]:
    """The buffers; how many bytes are taken of them is said now and then."""
    taken = 0
    for buffer in buffers:
        yield buffer
        taken += len(buffer)
        if taken >= TOLD_BYTES:
            say(taken)
            taken = 0
    say(taken)


def _fingerprint(job: Job, planned: Planned) -> str:
    """What tells this job from any other: all that decides what its files hold."""
    told = (planned.plan.tensors, planned.plan.writes, planned.store.name, planned.codec, job.step, job.identity)
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()
