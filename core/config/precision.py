"""Which number formats a run uses, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from core.config.recipe import Recipe

ComputeName = Literal["float32", "bfloat16", "float16"]
FloatName = Literal["float32", "bfloat16"]
# float8: E4M3 under a scale for 128 neighbours; of the second moment its root.
MomentName = Literal["float32", "bfloat16", "float16", "float8"]
# remainder: the low 16 bits of a float32 number, whose high ones are the bfloat16 parameter.
MasterName = Literal["float32", "remainder"]
# Of one number; without scales.
BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "remainder": 2}
# A moment of these formats has a scale of one byte for so many.
SCALED_MOMENTS = ("float16", "float8")
SCALE_ELEMENTS = 128


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """`compute`: dtype of parameters and activations. Router, norms' statistics and losses are float32 whatever it is.

    recipe: the formats of the operands of matrix products in layers; None multiplies in `compute`. primary: the weights themselves
    are held in the recipe's format, and gathered in it. main_gradients: of gradients summed over microbatches, and sent to be
    summed over copies. moments: of the optimizer's two moments between steps. masters: of the weights that are updated. The arithmetic
    of the update is float32. loss_scale: what losses are multiplied by before a float16 backward (None: found out as training goes).
    insight_interval: steps between measurements of what a recipe's rounding loses (0: never).
    """

    compute: ComputeName = "float32"
    recipe: Recipe | None = None
    primary: bool = False
    main_gradients: FloatName = "float32"
    moments: MomentName = "float32"
    masters: MasterName = "float32"
    loss_scale: float | None = None
    insight_interval: int = 50


def state_bytes(precision: PrecisionConfig) -> float:
    """Of what an optimizer keeps of one parameter besides it: a master where it is not float32 itself, and both moments with scales."""
    master = 0 if precision.compute == "float32" else BYTES[precision.masters]
    scales = 2 / SCALE_ELEMENTS if precision.moments in SCALED_MOMENTS else 0
    return master + 2 * BYTES[precision.moments] + scales
