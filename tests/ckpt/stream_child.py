"""A writer in a process of its own, for tests that kill it or measure its memory."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ckpt.offline import held_as_stored
from ckpt.source import Described, Form
from ckpt.stored import CheckpointSource
from ckpt.stream import Job, Streaming, held_whole, write_checkpoint
from core.state.box import Box


class Plain:
    """A source of `tensors` float32 matrices of 4 MiB, which compress to nearly nothing."""

    def __init__(self, tensors: int) -> None:
        self.forms = {f"model.{number}": Form(shape=(1024, 1024), dtype="float32") for number in range(tensors)}

    def read(self, name: str, box: Box) -> Tensor:
        return torch.full(box.shape, float(name.removeprefix("model.")))

    def describe(self) -> Described | None:
        return None


def copy_of(source: str, target: str, workers: int) -> Job:
    """What writes the checkpoint `source` again, in whole tensors."""
    opener = partial(CheckpointSource, source)
    held = held_whole(opener())
    return Job(
        opener=opener, identity="same", target=target, held=held, step=3, extra={}, streaming=Streaming(workers=workers)
    )


def kill_when_finished(source: str, target: str, workers: str, files: str) -> None:
    """Copy, and be killed as soon as so many files are finished."""
    journal = Path(target).with_name(f".{Path(target).name}.partial") / "journal"

    def look(done: int, total: int) -> None:
        if len(list(journal.glob("0*.json"))) >= int(files):
            os.kill(os.getpid(), signal.SIGKILL)

    write_checkpoint(copy_of(source, target, int(workers)), look)


def make(target: str, tensors: str, memory_bytes: str) -> None:
    """Write `Plain`, compressed."""
    opener = partial(Plain, int(tensors))
    streaming = Streaming(codec="zstd", memory_bytes=int(memory_bytes))
    held = held_whole(opener())
    write_checkpoint(Job(opener=opener, identity="", target=target, held=held, step=0, extra={}, streaming=streaming))


def copy_small(source: str, target: str, memory_bytes: str) -> None:
    """Copy a checkpoint as it is, compressed."""
    found = CheckpointSource(source)
    streaming = Streaming(codec="zstd", memory_bytes=int(memory_bytes))
    held = held_as_stored(found.manifest, found)
    opener = partial(CheckpointSource, source)
    write_checkpoint(Job(opener=opener, identity="", target=target, held=held, step=0, extra={}, streaming=streaming))


def peak_kib() -> int:
    """The most memory that this process has had. (What getrusage says may be that of the process that started it.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    {"kill": kill_when_finished, "make": make, "copy": copy_small}[sys.argv[1]](*sys.argv[2:])
    print(peak_kib())
