"""Kinds of hardware that a run can be asked for, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from core.errors import ConfigError, Fault


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One kind of hardware. device: torch's device type; collectives: the process-group backend that serves it."""

    name: str
    title: str
    device: Literal["cpu", "cuda"]
    collectives: Literal["gloo", "nccl"]


PROFILES = (
    Profile(name="cpu", title="CPU cores of this machine", device="cpu", collectives="gloo"),
    Profile(name="gpu", title="CUDA devices of this machine", device="cuda", collectives="nccl"),
)


def find_profile(name: str) -> Profile:
    """The hardware called `name`. Raises ConfigError naming those there are."""
    for profile in PROFILES:
        if profile.name == name:
            return profile
    works = ", ".join(profile.name for profile in PROFILES)
    raise ConfigError([Fault(setting="--hw", value=name, rule="is not a known kind of hardware", works=works)])
