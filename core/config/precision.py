"""Which number formats a run uses, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FloatName = Literal["float32", "bfloat16"]
# Of one number.
BYTES: dict[FloatName, int] = {"float32": 4, "bfloat16": 2}
# How matrix products are quantised: per tensor with a history of scales or with the current one, in blocks of 128, in blocks of 32
# (OCP MX), in blocks of 16 at four bits.
RecipeName = Literal["fp8_delayed", "fp8_current", "fp8_blockwise", "mxfp8", "nvfp4"]
# Recipes whose operands are four bits wide.
FOUR_BITS: tuple[RecipeName, ...] = ("nvfp4",)


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """`compute`: dtype of parameters and activations. Router, norms' statistics and losses are float32 whatever it is.

    recipe: the format of the operands of matrix products in layers; None multiplies in `compute`. primary: the weights themselves
    are held in the recipe's format, and gathered in it. main_gradients: of gradients summed over microbatches, and sent to be
    summed over copies. moments: of the optimizer's two moments between steps. Master weights, and the arithmetic of the update, are
    float32.
    """

    compute: FloatName = "float32"
    recipe: RecipeName | None = None
    primary: bool = False
    main_gradients: FloatName = "float32"
    moments: FloatName = "float32"
