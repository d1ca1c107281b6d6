"""How much room experts have, as one word on a command line, and back: none, or FACTOR[:weight|:position][:pad]."""

from __future__ import annotations

import math

from core.config.architecture import Capacity
from core.config.router_text import TextError

CAPACITY_EXAMPLE = "1.25, 1.25:position, 1.25:weight:pad, or none"


def capacity_text(capacity: Capacity | None) -> str:
    """The text that `parse_capacity` turns back into `capacity`."""
    if capacity is None:
        return "none"
    return f"{capacity.factor!r}:{capacity.drop}{':pad' if capacity.pad else ''}"


def parse_capacity(text: str) -> Capacity | None:
    """The capacity that a text says; it drops by weight where it says nothing. Raises TextError."""
    if text.lower() == "none":
        return None
    number, *words = text.split(":")
    try:
        factor = float(number)
    except ValueError:
        factor = math.nan
    if not math.isfinite(factor):
        raise TextError("must begin with a finite number, the factor")
    pad = words[-1:] == ["pad"]
    match words[:-1] if pad else words:
        case [] | ["weight"]:
            return Capacity(factor=factor, drop="weight", pad=pad)
        case ["position"]:
            return Capacity(factor=factor, drop="position", pad=pad)
    raise TextError("may go on with what is kept, `weight` or `position`, and then with `pad`")
