"""Bytes of one number of a weight that is held as a recipe rounds it: between steps, and when other ranks fetch it."""

from __future__ import annotations

from core.config.precision import BYTES, PrecisionConfig
from core.config.recipe import BITS, SQUARE, Operand


def primary_operand(precision: PrecisionConfig) -> Operand | None:
    """How primary weights are rounded; None where there are none."""
    return precision.recipe.held if precision.primary and precision.recipe is not None else None


def held_bytes(precision: PrecisionConfig) -> float:
    """Of a number of a weight that the recipe takes, its share of the scales included: twice where the transpose is kept beside it."""
    operand = primary_operand(precision)
    if operand is None:
        return BYTES[precision.compute]
    return operand.num_bytes * (1 if operand.scaling in SQUARE else 2)


def fetched_bytes(precision: PrecisionConfig) -> float:
    """Of such a number on its way to other ranks: its code, or what both roundings are made of."""
    operand = primary_operand(precision)
    if operand is None or operand.scaling not in SQUARE:
        return BYTES[precision.compute]
    return BITS[operand.element] / 8
