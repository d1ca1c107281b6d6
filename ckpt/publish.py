"""Write a Hugging Face folder from any Source: a row of blocks at a time, by several processes, going on after a kill where it
stopped."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ckpt.ahead import ahead
from ckpt.float8 import BLOCK, SCALE, quantise
from ckpt.folder_plan import FolderPlan, Publishing, plan_folder
from ckpt.gather import Output
from ckpt.huggingface import METADATA
from ckpt.published import PublishedSource
from ckpt.shards import Layout, plan_of
from ckpt.source import MODEL_PREFIX, Source
from ckpt.store.safetensors import check_free, commit
from ckpt.store.tensorfile import TensorWriter
from ckpt.stream import Opener, Progress, Streaming
from ckpt.translate import Read, read_published
from ckpt.workers import share_out
from core.errors import CheckpointError, RequestError
from core.state.box import Box

JOURNAL = "journal.json"
WRITING = ".writing"
# What one process writes between two words about it, and at least what a kill costs.
ITEM_BYTES = 64 << 20


def write_published(
    opener: Opener,
    folder: str | Path,
    *,
    identity: str,
    publishing: Publishing | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write what `opener` opens as a Hugging Face folder, whole or not at all; its path.

    identity: changes whenever what the source holds does, so that two sources are never mixed after a kill. Files that an
    interrupted writer of the same folder has finished are kept. progress: called with the bytes of tensors done and in all.

    Raises as `plan_folder`; RequestError where the folder is in use or memory_bytes too little; CheckpointError where a tensor is
    damaged, the disk full, or a process killed.
    """
    publishing = publishing or Publishing()
    target = Path(folder).absolute()
    check_free(target, overwrite=publishing.overwrite)
    streaming = Streaming(memory_bytes=publishing.memory_bytes, workers=publishing.workers)
    assert streaming.run_bytes(), "raises where there is too little memory"
    plan = plan_folder(opener(), publishing)
    try:
        with _partial(target, _fingerprint(plan, identity)) as partial:
            _write_tensors(partial, plan.layout, (opener, streaming), progress)
            for name, content in plan.others.items():
                (partial / name).write_bytes(content)
            (partial / JOURNAL).unlink()
            commit(partial, target)
    except OSError as error:
        raise CheckpointError(f"{error.filename or target} cannot be written: {error.strerror or error}") from error
    return target


def _write_tensors(partial: Path, layout: Layout, how: tuple[Opener, Streaming], progress: Progress | None) -> None:
    """Every file of tensors that is not there yet."""
    opener, streaming = how
    items = tuple(_items(layout))
    account = _Account(partial, layout, items, progress)
    needed = layout.bytes - account.done
    free = shutil.disk_usage(partial).free
    if free < needed:
        raise CheckpointError(f"{partial}: needs {needed:,} bytes, {free:,} are free. Make room, or write elsewhere.")
    account.begin()
    write = _Writer(opener, partial, layout, items, streaming.run_bytes())
    todo, workers = account.todo(), streaming.workers
    share_out(write, [todo[n::workers] for n in range(min(workers, len(todo)))], account.take, str(partial))


@dataclass(frozen=True, kw_only=True)
class _Item:
    """Some outputs of a file, that one process writes."""

    file: str
    outputs: tuple[Output, ...]


def _items(layout: Layout) -> Iterator[_Item]:
    for file, outputs in layout.files.items():
        now: list[Output] = []
        for output in outputs:
            now.append(output)
            if sum(o.bytes for o in now) >= ITEM_BYTES:
                yield _Item(file=file, outputs=tuple(now))
                now = []
        if now:
            yield _Item(file=file, outputs=tuple(now))


class _Account:
    """What is finished of the files, as those who write them say."""

    def __init__(self, partial: Path, layout: Layout, items: Sequence[_Item], progress: Progress | None) -> None:
        self._partial, self._layout, self._items, self._progress = partial, layout, items, progress
        self._plans = {file: plan_of(outputs, METADATA) for file, outputs in layout.files.items()}
        there = {path.name: path.stat().st_size for path in partial.iterdir()}
        self._finished = {file for file, plan in self._plans.items() if there.get(file) == plan.bytes}
        sizes = layout.file_bytes()
        self.done = sum(sizes[file] for file in self._finished)
        self._left = {file: sum(item.file == file for item in items) for file in layout.files}

    def begin(self) -> None:
        """Make the files that are to be written, at their full size."""
        for file, plan in self._plans.items():
            if file not in self._finished:
                TensorWriter(self._partial / (file + WRITING), plan).close(sync=False)
        self.tell()

    def todo(self) -> list[int]:
        """The numbers of the items that are to be written."""
        return [number for number, item in enumerate(self._items) if item.file not in self._finished]

    def take(self, said: int | tuple[int, None]) -> None:
        """Bytes that were written, or the number of a finished item: a file that is complete takes its name."""
        if isinstance(said, int):
            self.done += said
            self.tell()
            return
        file = self._items[said[0]].file
        self._left[file] -= 1
        if not self._left[file]:
            path = self._partial / (file + WRITING)
            with path.open("rb") as written:
                os.fsync(written.fileno())
            path.rename(self._partial / file)

    def tell(self) -> None:
        """Show how far it is."""
        if self._progress:
            self._progress(self.done, self._layout.bytes)


@dataclass(frozen=True)
class _Band:
    """What belongs into a file: parts of its tensors, each with its name and the elements before it. `len`: the bytes.

    finished: the number of the item of which it is the last.
    """

    file: str
    parts: tuple[tuple[str, int, Tensor], ...]
    finished: int | None = None

    def __len__(self) -> int:
        return sum(data.nbytes for _, _, data in self.parts)


@dataclass(frozen=True)
class _Writer:
    """Writes items, in whichever process it is called; the next band is read while one is written."""

    opener: Opener
    partial: Path
    layout: Layout
    items: Sequence[_Item]
    run_bytes: int

    def __call__(self, numbers: Sequence[int], say: Callable[[Any], None]) -> None:
        writers: dict[str, TensorWriter] = {}
        try:
            with closing(ahead(self._bands(self.opener(), numbers), self.run_bytes)) as bands:
                for band in bands:
                    if band.file not in writers:
                        path, outputs = self.partial / (band.file + WRITING), self.layout.files[band.file]
                        writers[band.file] = TensorWriter(path, plan_of(outputs, METADATA), begin=False)
                    for name, first, data in band.parts:
                        writers[band.file].write(name, first, data)
                    say(len(band))
                    if band.finished is not None:
                        say((band.finished, None))
        finally:
            for writer in writers.values():
                writer.close(sync=False)

    def _bands(self, source: Source, numbers: Sequence[int]) -> Iterator[_Band]:
        """All that is written for some items."""
        known = source.known_scales if isinstance(source, PublishedSource) else _nothing

        def read(name: str, box: Box) -> Tensor:
            return source.read(MODEL_PREFIX + name, box)

        for number in numbers:
            item = self.items[number]
            for output in item.outputs:
                scales = None if output.scales is None else known(output.published.name)
                for box in _rows(output, self.run_bytes):
                    yield _Band(file=item.file, parts=_parts(output, box, read, scales))
            yield _Band(file=item.file, parts=(), finished=number)


def _rows(output: Output, run_bytes: int) -> Iterator[Box]:
    """Bands of the rows of a tensor, of about run_bytes in float32; those of blocks end with one."""
    shape = output.published.shape
    row = max(1, output.published.elements // max(1, shape[0]))
    step = max(1, run_bytes // (row * 4))
    if output.scales is not None:
        step = max(BLOCK, step // BLOCK * BLOCK)
    for first in range(0, shape[0], step):
        yield Box(offset=(first, *(0 for _ in shape[1:])), shape=(min(step, shape[0] - first), *shape[1:]))


def _parts(output: Output, box: Box, read: Read, known: Tensor | None) -> tuple[tuple[str, int, Tensor], ...]:
    """What a band of rows is in the file: the rows, or their numbers and the scales of their blocks."""
    (name,), first = output.names, box.offset[0] * (box.elements // box.shape[0])
    if output.scales is None:
        return ((name, first, read_published(output.published, box, read, output.dtype)),)
    blocks = slice(box.offset[0] // BLOCK, -(-(box.offset[0] + box.shape[0]) // BLOCK))
    wide = read_published(output.published, box, read, output.travels)
    numbers, scale = quantise(wide, None if known is None else known[blocks])
    return (name, first, numbers), (name + SCALE, blocks.start * scale.shape[1], scale.to(output.scales))


def _nothing(name: str) -> None:
    """No block scales are known."""


def _fingerprint(plan: FolderPlan, identity: str) -> str:
    """What tells this folder from any other: all that decides what its files hold."""
    forms = {file: [tuple(output.forms()) for output in outputs] for file, outputs in plan.layout.files.items()}
    return hashlib.blake2b(repr((forms, identity)).encode(), digest_size=16).hexdigest()


@contextmanager
def _partial(target: Path, fingerprint: str) -> Iterator[Path]:
    """The folder `.NAME.partial` beside the target, held by this process alone; emptied if it was begun for anything else."""
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    handle = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(f"{target}: another process is writing it. Wait for it, or give another name.") from None
        journal = partial / JOURNAL
        if not journal.is_file() or journal.read_text() != fingerprint:
            for path in partial.iterdir():
                path.unlink()
            journal.write_text(fingerprint)
        yield partial
    finally:
        os.close(handle)
