"""Faults of single numbers, and the nearest values that would do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from core.errors import Fault

# How far from a mistyped number one looks for a right one.
FARTHEST = 10_000


def positive(prefix: str, value: Any, *names: str) -> Iterator[Fault]:
    """A fault for each named field of a declaration that is below one."""
    held = {field.name: getattr(value, field.name) for field in fields(value)}
    for name in names:
        yield from at_least(f"{prefix}.{name}", held[name], 1)


def at_least(setting: str, value: float, least: float) -> Iterator[Fault]:
    """A fault where the value is less, or no number."""
    # written so that a NaN is a fault too
    if not value >= least:
        rule = "must be positive" if least == 1 else f"must be at least {least}"
        yield Fault(code="value.at-least", setting=setting, value=value, rule=rule, works=f"{least} or more")


def above(setting: str, value: float, floor: float, works: str = "") -> Iterator[Fault]:
    """A fault where the value is not greater, or no number."""
    if not value > floor:
        rule = "must be positive" if floor == 0 else f"must be greater than {floor}"
        works = works or f"any number greater than {floor}"
        yield Fault(code="value.above", setting=setting, value=value, rule=rule, works=works)


def even(setting: str, value: int) -> Iterator[Fault]:
    """A fault where a positive value is odd."""
    if value > 0 and value % 2:
        rule = "must be even, because the rotation turns pairs"
        works = nearest(value, lambda n: n % 2 == 0)
        yield Fault(code="value.even", setting=setting, value=value, rule=rule, works=works)


def nearest(value: int, works: Callable[[int], bool], *, most: int | None = None) -> str:
    """The positive values, `most` at most, that work and are nearest to `value`, below and above: `32 or 64`; "" for none."""
    top = value + FARTHEST if most is None else min(most, value + FARTHEST)
    start = min(value - 1, top)
    below = next(
        (n for n in range(start, max(0, start - FARTHEST), -1) if works(n)), 1 if value > 1 and works(1) else None
    )
    above = next((n for n in range(value + 1, top + 1) if works(n)), None)
    return " or ".join(str(n) for n in (below, above) if n is not None)


def nearest_multiples(value: int, unit: int) -> str:
    """The positive multiples of `unit` on both sides of `value`, which is none."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below > 0 else f"{unit}"
