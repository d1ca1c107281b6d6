"""Two architectures field by field: what a user has to know where a model meets weights of another one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import groupby
from typing import Any

from core.config.architecture import ModelConfig

_OUTSIDE = -1  # of the layers


def config_differences(found: ModelConfig, wanted: ModelConfig) -> tuple[str, ...]:
    """One line for each field in which two models differ, as `layers[1..3].mlp.router.scale: 2.5 instead of 1.0`; none if equal.

    Layers with the same difference share a line; where the kinds differ (Dense and MoE, present and absent) their names are said.
    """
    found_lines = list(_differences("", found, wanted))
    shown = [f"{path}: {text}" for layer, path, text in found_lines if layer == _OUTSIDE]
    in_layers = sorted((path, text, layer) for layer, path, text in found_lines if layer != _OUTSIDE)
    for (path, text), same in groupby(in_layers, key=lambda line: line[:2]):
        shown.append(f"layers[{_ranges([layer for _, _, layer in same])}].{path}: {text}")
    return tuple(shown)


def _differences(path: str, found: Any, wanted: Any) -> Iterator[tuple[int, str, str]]:
    """(layer, path, what differs)."""
    if found == wanted:
        return
    if is_dataclass(found) and type(found) is type(wanted):
        for field in fields(found):
            name = f"{path}.{field.name}" if path else field.name
            mine, other = getattr(found, field.name), getattr(wanted, field.name)
            if name == "layers" and len(mine) == len(other):
                for number, (a, b) in enumerate(zip(mine, other, strict=True)):
                    yield from ((number, where, text) for _, where, text in _differences("", a, b))
            elif name == "layers":
                yield _OUTSIDE, name, f"{len(mine)} instead of {len(other)}"
            else:
                yield from _differences(name, mine, other)
    else:
        yield _OUTSIDE, path, f"{_say(found)} instead of {_say(wanted)}"


def _say(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_say, value))})" if value else "none"
    return "none" if value is None else str(value)


def _ranges(numbers: list[int]) -> str:
    """`0, 2..5` of ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
