"""A router's balance and selection as one word each on a command line, and back.

balance    none, or parts joined by +: aux:SCOPE:COEFFICIENT, z:COEFFICIENT, bias:RATE, quantile:EMA
selection  top_k, sinkhorn, sinkhorn:TOLERANCE, sinkhorn:TOLERANCE:ROUNDS, expert_choice
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from typing import get_args

from core.config.architecture import (
    AuxLoss,
    AuxScope,
    Balance,
    ExpertBias,
    ExpertChoice,
    QuantileBias,
    Selection,
    Sinkhorn,
    TopK,
    ZLoss,
)

BALANCE_EXAMPLE = "aux:microbatch:0.01+z:0.001+bias:0.001, quantile:0.9, or none"
SELECTION_EXAMPLE = "top_k, sinkhorn, sinkhorn:0.0001:1000 (tolerance, rounds), or expert_choice"


class TextError(ValueError):
    """What is wrong with a text, as the rule of a fault."""


def balance_text(balance: Sequence[Balance]) -> str:
    """The text that `parse_balance` turns back into `balance`."""
    return "+".join(map(_part_text, balance)) or "none"


def parse_balance(text: str) -> tuple[Balance, ...]:
    """The balances of a router, in the order of the text. Raises TextError."""
    if text.lower() == "none":
        return ()
    # A plus before a digit belongs to a number: 1e+1.
    return tuple(_part(part.strip()) for part in re.split(r"\+(?!\d)", text))


def selection_text(selection: Selection) -> str:
    """The text that `parse_selection` turns back into `selection`."""
    if isinstance(selection, Sinkhorn):
        return f"sinkhorn:{selection.tolerance!r}:{selection.rounds}"
    return "expert_choice" if isinstance(selection, ExpertChoice) else "top_k"


def parse_selection(text: str) -> Selection:
    """Who chooses whom. Raises TextError."""
    name, *values = text.split(":")
    kind = _known(name, ("top_k", "sinkhorn", "expert_choice"), "selections")
    if kind != "sinkhorn":
        _takes(text, values, 0, "no value")
        return TopK() if kind == "top_k" else ExpertChoice()
    if len(values) > 2:
        raise TextError(f"{text}: sinkhorn takes a tolerance and a number of rounds at most")
    tolerance = _number(values[0], text) if values else Sinkhorn().tolerance
    rounds = _whole(values[1], text) if len(values) > 1 else Sinkhorn().rounds
    return Sinkhorn(tolerance=tolerance, rounds=rounds)


def _part_text(part: Balance) -> str:
    match part:
        case AuxLoss():
            return f"aux:{part.scope}:{part.coefficient!r}"
        case ZLoss():
            return f"z:{part.coefficient!r}"
        case ExpertBias():
            return f"bias:{part.rate!r}"
        case QuantileBias():
            return f"quantile:{part.ema!r}"


def _part(text: str) -> Balance:
    name, *values = text.split(":")
    match _known(name, ("aux", "z", "bias", "quantile"), "balances"):
        case "aux":
            _takes(text, values, 2, "a scope and a coefficient, as aux:microbatch:0.01")
            scopes = get_args(AuxScope)
            _known(values[0], scopes, "scopes")
            return AuxLoss(scope=scopes[scopes.index(values[0])], coefficient=_number(values[1], text))
        case "z":
            _takes(text, values, 1, "a coefficient, as z:0.001")
            return ZLoss(coefficient=_number(values[0], text))
        case "bias":
            _takes(text, values, 1, "a rate, as bias:0.001")
            return ExpertBias(rate=_number(values[0], text))
        case _:
            _takes(text, values, 1, "the share of the old thresholds that is kept, as quantile:0.9")
            return QuantileBias(ema=_number(values[0], text))


def _known(name: str, names: Sequence[str], what: str) -> str:
    """`name`, which is one of `names`."""
    if name in names:
        return name
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise TextError(f"'{name}' is none of the {what} {', '.join(names)}{hint}")


def _takes(text: str, values: Sequence[str], count: int, what: str) -> None:
    if len(values) != count:
        raise TextError(f"'{text}' needs {what}")


def _number(value: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise TextError(f"'{value}' in '{text}' must be a finite number")
    return number


def _whole(value: str, text: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise TextError(f"'{value}' in '{text}' must be a whole number") from None
