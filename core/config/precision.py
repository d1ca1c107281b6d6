"""Which number formats a run uses, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FloatName = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """`compute`: dtype of parameters and activations. Router, norms' statistics, losses, gradients summed over microbatches,
    master weights and moments are float32 whatever it is."""

    compute: FloatName = "float32"
