"""The one exception family of the zoo. Every class carries the exit code with which a command ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class ZooError(Exception):
    """A failure whose message is meant for the user: shown without a traceback."""

    exit_code = 1


class RequestError(ZooError):
    """The request itself cannot be carried out as it stands: a name, a path, a folder that is not what it should be."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One setting that cannot run: as the user wrote it, its value, the rule it breaks, and values that would do.

    code: the rule's own name, `area.what-it-asks`, which stays when its words change; empty where a value breaks no rule of
    core/check, as a path that is not there.
    """

    setting: str
    value: object
    rule: str
    works: str
    code: str = ""

    def __str__(self) -> str:
        return _sentence(self)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One setting that runs and could be better: the fields mean what a Fault's do."""

    setting: str
    value: object
    rule: str
    works: str
    code: str

    def __str__(self) -> str:
        return _sentence(self)


def _sentence(said: Fault | Advice) -> str:
    code = f" [{said.code}]" if said.code else ""
    return f"{said.setting}={said.value}: {said.rule}. Works: {said.works}.{code}"


class ConfigError(RequestError):
    """Every fault of a request at once (contract 9)."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        count = len(self.faults)
        head = "1 setting cannot run:" if count == 1 else f"{count} settings cannot run:"
        super().__init__("\n".join([head, *(f"  {fault}" for fault in self.faults)]))


class DataError(RequestError):
    """The training data cannot be used: missing, unreadable, empty, too short, or of another format than it claims."""


class CheckpointError(ZooError):
    """A checkpoint cannot be read or written: missing, damaged, half-written, for another model, or the disk is full."""


class ParallelError(ZooError):
    """Ranks that should work together do not: one does not answer, or what reaches another is not what was sent."""
