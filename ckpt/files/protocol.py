"""Where the bytes of a checkpoint lie: a folder or a prefix of an object store, with files that are written whole and read by range."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

# A local path, or the URL of an object store such as s3://bucket/prefix.
Address = str | Path
# Contiguous bytes; an array is one of uint8.
Buffer = bytes | np.ndarray


class Files(Protocol):
    """Files below one address, by relative path with '/'. What fails is an OSError; its `filename` is the full path.

    reads_at_once, writes_at_once: how many under way at the same time are of use, and not too much for the memory.
    """

    @property
    def address(self) -> str:
        """Where they are, as a user would write it."""
        ...

    @property
    def reads_at_once(self) -> int: ...

    @property
    def writes_at_once(self) -> int: ...

    def read(self, path: str) -> bytes:
        """A whole file. Raises FileNotFoundError where there is none."""
        ...

    def read_into(self, path: str, offset: int, buffers: Sequence[np.ndarray]) -> None:
        """Fill uint8 arrays, one after the other, from byte `offset` on. A file that ends before is an OSError."""
        ...

    def write(self, path: str, buffers: Iterable[Buffer], *, push: bool = True) -> int:
        """Make a file of the buffers; its bytes. Takes the next buffer when the last is written.

        push: it is on the disk when this returns, rather than at some time or after `push`.
        """
        ...

    def push(self, path: str) -> None:
        """Have a file that is written on the disk; from any thread."""
        ...

    def sizes(self) -> Mapping[str, int | None]:
        """Every file by path, with its bytes, or None where a listing does not tell them; empty where there is nothing."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file, or everything below a folder; nothing, where there is nothing. The path '' is everything."""
        ...

    def free_bytes(self) -> int | None:
        """What may still be written; None where nobody can say."""
        ...
