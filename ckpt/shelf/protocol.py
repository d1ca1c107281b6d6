"""The checkpoints of a run, of which each appears whole or not at all."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Complete:
    """A checkpoint that is whole: every file of its manifest is there in its size."""

    address: str
    step: int
    sequence: int


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What checkpoints of a run there are: the complete ones, oldest save first, and one line per one that is not."""

    complete: tuple[Complete, ...]
    incomplete: tuple[str, ...]


class Shelf(Protocol):
    """Where a run keeps its checkpoints. Failures are CheckpointErrors or OSErrors."""

    @property
    def address(self) -> str:
        """The run, as a user would write it."""
        ...

    def only_saver(self) -> AbstractContextManager[None]:
        """Hold the run for one saver. Raises CheckpointError if another one saves into it now, where that can be known."""
        ...

    def begin(self, step: int) -> str:
        """Tidy up after interrupted saves and make room for a checkpoint that nobody takes for one yet; its address."""
        ...

    def publish(self, step: int, partial: str, manifest: bytes) -> str:
        """Write the manifest, make the checkpoint at `partial` that of `step`, and the latest; its address."""
        ...

    def discard(self, partial: str) -> None:
        """Remove what is left of a save that failed."""
        ...

    def next_sequence(self) -> int:
        """The number that makes a save the newest of its run."""
        ...

    def prune(self, keep: int) -> None:
        """Remove all but the `keep` newest complete checkpoints. What is not complete is left alone: it may be evidence."""
        ...

    def survey(self) -> Survey:
        """Look at every checkpoint; nothing is changed. A run without checkpoints has an empty survey."""
        ...
