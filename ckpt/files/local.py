"""A folder of the file system, read and written without any copy between the disk cache and the tensors."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ckpt.files.protocol import Buffer

# The most buffers that one system call takes (IOV_MAX of Linux).
MOST_BUFFERS = 1024
# For longer writes Linux takes its cache in larger pieces, of memory that nobody has used for long: on a virtual machine whose host
# has taken back what was free, those come four times as slowly.
WRITE_BYTES = 128 << 10
# So much is written between two words to the disk that it may begin.
PUSH_BYTES = 16 << 20


class LocalFiles:
    """Files below `root`. Folders are made as files need them."""

    # Some readers at once hide the disk's latency; more than cores only take the cache from each other.
    reads_at_once = min(4, os.cpu_count() or 1)
    # While one file is pushed to the disk the next is filled; more only get into each other's way.
    writes_at_once = 2

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def address(self) -> str:
        """The folder."""
        return str(self.root)

    def read(self, path: str) -> bytes:
        """A whole file. Raises FileNotFoundError where there is none."""
        with open(self.root / path, "rb", opener=_open_to_read) as file:
            return file.read()

    def read_into(self, path: str, offset: int, buffers: Sequence[np.ndarray]) -> None:
        """Fill uint8 arrays from byte `offset` on, straight from the disk cache. A file that ends before is an OSError."""
        full = self.root / path
        handle = _open_to_read(full)
        try:
            for start in range(0, len(buffers), MOST_BUFFERS):
                offset += _read_all(handle, offset, buffers[start : start + MOST_BUFFERS], full)
        finally:
            os.close(handle)

    def write(self, path: str, buffers: Iterable[Buffer], *, push: bool = True) -> int:
        """Make a file of the buffers, and push it to the disk; its bytes."""
        full = self.root / path
        full.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        size = 0
        try:
            for some in _grouped(buffers):
                done = _write_all(handle, some)
                _begin_to_push(handle, size, done)
                size += done
            if push:
                os.fsync(handle)
        except OSError as error:
            error.filename = str(full)
            raise
        finally:
            os.close(handle)
        return size

    def push(self, path: str) -> None:
        """Wait until a file is on the disk. What failed since it was written is raised here: Linux tells it to whoever asks first."""
        full = self.root / path
        handle = os.open(full, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            error.filename = str(full)
            raise
        finally:
            os.close(handle)

    def sizes(self) -> dict[str, int]:
        """The bytes of every file, by path."""
        return dict(_sizes(self.root, ""))

    def remove(self, path: str) -> None:
        """Remove a file, or everything below a folder; nothing, where there is nothing."""
        full = self.root / path
        if full.is_dir():
            shutil.rmtree(full)
        else:
            full.unlink(missing_ok=True)

    def free_bytes(self) -> int | None:
        """What the file system has left, also for a folder that is still to be made."""
        there = next(folder for folder in (self.root, *self.root.absolute().parents) if folder.exists())
        return shutil.disk_usage(there).free


def _sizes(folder: Path, prefix: str) -> Iterator[tuple[str, int]]:
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir():
            yield from _sizes(Path(entry.path), f"{prefix}{entry.name}/")
            continue
        # A link to nothing is no file; neither is what another process has removed meanwhile.
        with contextlib.suppress(FileNotFoundError):
            yield f"{prefix}{entry.name}", entry.stat().st_size


def _begin_to_push(handle: int, offset: int, size: int) -> None:
    """Have the disk begin with what was written while more of it comes: otherwise it would idle until the end and then keep us waiting.

    Linux takes the word that pages are not needed for that; it drops only those that are on the disk already.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.posix_fadvise(handle, offset, size, os.POSIX_FADV_DONTNEED)


def _open_to_read(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """A handle. Without O_NONBLOCK, opening a pipe that lies in a file's place would wait for ever."""
    return os.open(path, flags | os.O_NONBLOCK)


def _grouped(buffers: Iterable[Buffer]) -> Iterator[list[Buffer]]:
    """The buffers in groups of PUSH_BYTES, or of as many as one system call takes."""
    group: list[Buffer] = []
    size = 0
    for buffer in buffers:
        group.append(buffer)
        size += len(buffer)
        if size >= PUSH_BYTES or len(group) == MOST_BUFFERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _write_all(handle: int, buffers: list[Buffer]) -> int:
    """Write all buffers at the end, small ones together; a system call may take only a part of what it is given."""
    left = deque(_view(buffer) for buffer in buffers if len(buffer))
    total = 0
    while left:
        done = os.writev(handle, _first(left))
        total += done
        while done:
            whole = min(done, len(left[0]))
            left[0] = left[0][whole:]
            done -= whole
            if not left[0]:
                left.popleft()
    return total


def _first(buffers: deque[memoryview]) -> list[memoryview]:
    """The first WRITE_BYTES of the buffers."""
    found, size = [], 0
    for buffer in buffers:
        found.append(buffer[: WRITE_BYTES - size])
        size += len(found[-1])
        if size == WRITE_BYTES:
            break
    return found


def _read_all(handle: int, offset: int, buffers: Sequence[np.ndarray], path: Path) -> int:
    left = [_view(buffer) for buffer in buffers if len(buffer)]
    total = 0
    while left:
        done = os.preadv(handle, left, offset + total)
        if done == 0:
            raise OSError(
                errno.EIO, f"ends after {offset + total} bytes, in the middle of what it should hold", str(path)
            )
        total += done
        left = _after(left, done)
    return total


def _view(buffer: Buffer) -> memoryview:
    return buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)


def _after(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the buffers when `done` bytes of them are through."""
    for number, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[number + 1 :]]
        done -= len(buffer)
    return []
