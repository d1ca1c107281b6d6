"""What the doctor finds, and what it looks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from core.config.mapping import DispatcherName
from core.config.recipe import Recipe
from core.config.run import RunConfig
from launch.profiles import Profile

State = Literal["ok", "missing", "warn"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line: what was looked at, what is there, what is needed, and how to get it where it is not all right.

    state: `missing` keeps the set-up from running, `warn` makes it slower or may.
    """

    what: str
    found: str
    needed: str
    state: State
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a set-up needs of each of its machines. gpus: devices, or on a CPU processes. run: None where no model was named."""

    profile: Profile
    gpus: int
    nodes: int
    run: RunConfig | None = None

    @property
    def recipe(self) -> Recipe | None:
        """The low precision that is asked for."""
        return None if self.run is None else self.run.precision.recipe

    @property
    def dispatcher(self) -> DispatcherName | None:
        """What moves tokens to experts."""
        return None if self.run is None else self.run.parallel.dispatcher


def found(what: str, there: str, needed: str, state: State, fix: str = "") -> Finding:
    """A finding; how to get it is said only where it is not all right."""
    return Finding(what=what, found=there, needed=needed, state=state, fix="" if state == "ok" else fix)
