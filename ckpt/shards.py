"""The safetensors files of a new folder, written by all ranks of a model at once: each file by one rank, in bounded memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ckpt.agree import each
from ckpt.gather import Held, Output, collect, route
from ckpt.store.safetensors import Stored, plan_shards, shard_name
from ckpt.store.tensorfile import FilePlan, TensorFile, TensorWriter, plan_file
from core.errors import CheckpointError
from core.parallel.groups import Group

SHARD_BYTES = 5_000_000_000
# What a rank holds of other ranks' tensors, and another time of its own for others, while files are written.
ROUND_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The files of a folder, each with its outputs, one name per output; `bytes` of all tensors. as_placed: the files are
    those that were given."""

    files: Mapping[str, tuple[Output, ...]]
    bytes: int
    as_placed: bool

    def file_bytes(self) -> dict[str, int]:
        """The bytes of the tensors in each file."""
        return {
            file: sum(_bytes(form) for output in outputs for form in output.forms())
            for file, outputs in self.files.items()
        }

    def placed(self) -> dict[str, str]:
        """The file of every tensor."""
        return {
            name: file for file, outputs in self.files.items() for output in outputs for name, _, _ in output.forms()
        }


def plan_layout(outputs: Sequence[Output], placed: Mapping[str, str] | None, shard_bytes: int | None) -> Layout:
    """Every tensor in the file where `placed` has it, if it has exactly these and no size is asked for; else shards of at most
    `shard_bytes` (None: 5 GB), in the order of the outputs. Block scales lie beside their numbers."""
    single = {name: replace(output, names=(name,)) for output in outputs for name in output.names}
    sizes = {name: sum(_bytes(form) for form in output.forms()) for name, output in single.items()}
    total = sum(sizes.values())
    if placed is not None and shard_bytes is None and _fits(single.values(), placed):
        files: dict[str, list[Output]] = {}
        for name, output in single.items():
            files.setdefault(placed[name], []).append(output)
        return Layout(files={file: tuple(found) for file, found in files.items()}, bytes=total, as_placed=True)
    shards = plan_shards(list(sizes.items()), shard_bytes or SHARD_BYTES)
    named = {
        shard_name(number, len(shards)): tuple(single[name] for name in shard) for number, shard in enumerate(shards)
    }
    return Layout(files=named, bytes=total, as_placed=False)


def plan_of(outputs: Iterable[Output], metadata: Mapping[str, str]) -> FilePlan:
    """The file of some outputs."""
    forms = {name: (dtype, shape) for output in outputs for name, dtype, shape in output.forms()}
    return plan_file(forms, metadata)


def _fits(outputs: Iterable[Output], placed: Mapping[str, str]) -> bool:
    """Whether `placed` has all tensors and no other, those of an output in one file."""
    files = [[placed.get(name) for name, _, _ in output.forms()] for output in outputs]
    return sum(map(len, files)) == len(placed) and all(len(set(found)) == 1 and found[0] for found in files)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is written: the files, their headers' metadata by file, where, and block scales to try, by published name."""

    layout: Layout
    metadata: Mapping[str, Mapping[str, str]]
    folder: Path
    known: Callable[[str], Tensor | None]


def write_files(job: Job, held: Held, world: Group, device: torch.device) -> None:
    """Write every file of the layout. Collective over `world`; each rank writes some of them, round by round, to the end.

    At most about ROUND_BYTES of other ranks' tensors (or one larger tensor per writing rank) are on a rank at a time. Raises
    CheckpointError on every rank where one of them fails.
    """
    writers = _writers(job.layout, world.size)
    budget = max(1, ROUND_BYTES // min(world.size, len(job.layout.files)))
    turns = [tuple(_turns(job.layout, files, budget)) for files in writers]
    load, writing = Counter[int](), _Writing(job)
    try:
        for number in range(max(map(len, turns))):
            now = [(rank, mine[number]) for rank, mine in enumerate(turns) if number < len(mine)]
            buckets = [route(turn.outputs, (rank,), load) for rank, turn in now]
            arrived = collect(buckets, held, world, device)
            turn = turns[world.position][number] if number < len(turns[world.position]) else None
            each(world, lambda turn=turn, arrived=arrived: writing.take(turn, arrived) if turn else None)  # type: ignore[misc]
    finally:
        writing.stop()


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """What a rank writes in one round: some outputs of a file; last: after which it is complete."""

    file: str
    outputs: tuple[Output, ...]
    last: bool


class _Writing:
    """This rank's file under way."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._writer: TensorWriter | None = None

    def take(self, turn: _Turn, arrived: list[tuple[Output, Tensor]]) -> None:
        """Write what arrived. Raises CheckpointError that names the file."""
        path = self._job.folder / turn.file
        try:
            if self._writer is None:
                outputs = self._job.layout.files[turn.file]
                self._writer = TensorWriter(path, plan_of(outputs, self._job.metadata[turn.file]))
            while arrived:
                output, data = arrived.pop(0)
                known = None if output.scales is None else self._job.known(output.published.name)
                for name, tensor in output.finish(data.cpu(), known):
                    self._writer.write(name, 0, tensor)
            if turn.last:
                writer, self._writer = self._writer, None
                writer.close()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written: {error}") from error

    def stop(self) -> None:
        """Let go of a file that a failure left unfinished."""
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close(sync=False)


class KnownScales:
    """Block scales of the folder that a model came from, as far as it is still there."""

    def __init__(self, folder: Path, stored: Mapping[str, Stored]) -> None:
        self._folder = folder
        self._stored = stored
        self._files: dict[str, TensorFile | None] = {}

    def read(self, name: str) -> Tensor | None:
        """The scales of a published tensor, None where there are none any more."""
        scale = self._stored[name].scale if name in self._stored else None
        if scale is None:
            return None
        file, found = self._open(self._stored[scale].file), None
        if file is not None and scale in file.tensors and file.tensors[scale].shape == self._stored[scale].shape:
            with suppress(CheckpointError):
                found = file.read(scale)
        return found

    def close(self) -> None:
        """Close every file."""
        for file in self._files.values():
            if file is not None:
                file.close()

    def _open(self, name: str) -> TensorFile | None:
        if name not in self._files:
            self._files[name] = None
            with suppress(OSError, ValueError):
                self._files[name] = TensorFile(self._folder / name)
        return self._files[name]


def _writers(layout: Layout, ranks: int) -> list[list[str]]:
    """The files that each rank writes: the largest first, each by the rank with the fewest bytes so far."""
    sizes = layout.file_bytes()
    load, mine = [0] * ranks, [list[str]() for _ in range(ranks)]
    for file in sorted(sizes, key=lambda file: -sizes[file]):
        rank = load.index(min(load))
        load[rank] += sizes[file]
        mine[rank].append(file)
    return mine


def _turns(layout: Layout, files: Sequence[str], budget: int) -> Iterator[_Turn]:
    for file in files:
        outputs = {output.names[0]: output for output in layout.files[file]}
        parts = plan_shards([(name, output.bytes) for name, output in outputs.items()], budget)
        for number, part in enumerate(parts):
            yield _Turn(file=file, outputs=tuple(outputs[name] for name in part), last=number == len(parts) - 1)


def _bytes(form: tuple[str, torch.dtype, tuple[int, ...]]) -> int:
    return math.prod(form[2]) * form[1].itemsize
