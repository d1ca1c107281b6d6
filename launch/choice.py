"""Which of a family's set-ups a request means, by size, hardware and name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from core.config.family import Family, Preset
from core.errors import ConfigError, Fault

DEFAULT_PRESET = "default"


def choose_preset(family: Family, *, hardware: str, size: str | None, name: str | None) -> Preset:
    """The first preset for `hardware` that has the size and the name, where they are given.

    Raises ConfigError naming those there are, and where a name that is none here is one.
    """
    of_size = [preset for preset in family.presets if size in (None, preset.size)]
    here = [preset for preset in of_size if preset.hardware == hardware]
    of = f"{family.name}{f' {size}' if size else ''}"
    if not here:
        works = _by_size(of_size or family.presets)
        rule = f"has no set-up of {of}"
        raise ConfigError([Fault(code="request.hardware", setting="--hw", value=hardware, rule=rule, works=works)])
    for preset in here:
        if name in (None, preset.name):
            return preset
    names = list(dict.fromkeys(preset.name for preset in here))
    elsewhere = [preset for preset in family.presets if preset.name == name]
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f" (did you mean {close[0]}?)" if close and not elsewhere else ""
    rule = f"is no set-up of {of} for --hw {hardware}{hint}"
    works = "; ".join([", ".join(names), *([f"{name} with {_by_size(elsewhere)}"] if elsewhere else [])])
    raise ConfigError([Fault(code="request.preset", setting="--preset", value=name, rule=rule, works=works)])


def choose_continued(family: Family, *, hardware: str, name: str | None) -> Preset:
    """The family's preset for going on from weights on the hardware. Raises ConfigError where there is none, or a name is given."""
    if name is not None:
        rule = "cannot be chosen with --init: on each hardware there is one way of going on from weights"
        fault = Fault(code="request.preset-of-weights", setting="--preset", value=name, rule=rule, works="no --preset")
        raise ConfigError([fault])
    for preset in family.continued:
        if preset.hardware == hardware:
            return preset
    works = ", ".join(f"--hw {preset.hardware}" for preset in family.continued) or "no --init"
    rule = f"has no set-up for going on from weights of {family.name}"
    raise ConfigError([Fault(code="request.hardware", setting="--hw", value=hardware, rule=rule, works=works)])


def preset_origin(preset: Preset) -> str:
    """Where a setting comes from that a preset has: `preset`, and its name where it has one of its own."""
    return "preset" if preset.name == DEFAULT_PRESET else f"preset {preset.name}"


def _by_size(presets: Iterable[Preset]) -> str:
    """Where there are set-ups: `--size tiny --hw cpu or gpu; --size huge --hw h100`."""
    there: dict[str | None, list[str]] = {}
    for preset in presets:
        hardware = there.setdefault(preset.size, [])
        if preset.hardware not in hardware:
            hardware.append(preset.hardware)
    return "; ".join(f"--size {size} --hw {_listed(hardware)}" for size, hardware in there.items())


def _listed(names: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join([*([", ".join(names[:-1])] if len(names) > 1 else []), names[-1]])
