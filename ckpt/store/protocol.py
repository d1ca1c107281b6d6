"""What a store does: write boxes of arrays into a folder, and read them back. Data are numpy arrays (bfloat16 by ml_dtypes)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from core.state.box import Box


@dataclass(frozen=True, kw_only=True)
class Array:
    """An array of the store: `path` inside the checkpoint folder. Writers of different chunks never disturb each other."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Block:
    """Data for the piece `box` (in the array's coordinates) of `array`. `first`: the array's description goes with it."""

    array: Array
    box: Box
    data: np.ndarray
    first: bool


@dataclass(frozen=True, kw_only=True)
class Request:
    """The piece `box` (in the array's coordinates) of the array at `path`, which is said to have `shape` and `dtype`."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    box: Box


class Store(Protocol):
    """Writes and reads boxes of arrays. Every failure is a CheckpointError or OSError that names the file or array."""

    @property
    def name(self) -> str:
        """How the manifest names this store."""
        ...

    def begin(self, folder: Path, arrays: Iterable[Array]) -> None:
        """Prepare `folder` for `arrays`. Called once, on one rank, before any write."""
        ...

    def write(self, folder: Path, blocks: Iterable[Block]) -> None:
        """Write every block and return when all are on the disk. Takes the next block only as memory allows."""
        ...

    def files(self, array: Array, box: Box, first: bool) -> tuple[str, ...]:
        """The files, relative to the checkpoint folder, that writing such a block makes."""
        ...

    def read(self, folder: Path, requests: Iterable[Request]) -> Iterator[np.ndarray]:
        """The data of every request, in order, a bounded number of bytes ahead. A missing chunk is an error, never zeros."""
        ...
