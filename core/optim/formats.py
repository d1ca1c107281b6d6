"""In which formats an optimizer keeps what it need not keep as precisely as its masters."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core.config.precision import PrecisionConfig

_DTYPES: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Formats:
    """moments: of Adam's two moments between steps. gradients: of the main gradients, which are summed over microbatches and copies.

    None: the dtype of the masters, float32, or float64 for float64 parameters. Masters are always that (report section 4.1.6).
    """

    moments: torch.dtype | None = None
    gradients: torch.dtype | None = None


def formats_of(precision: PrecisionConfig) -> Formats:
    """What a run asks for."""
    return Formats(moments=_DTYPES[precision.moments], gradients=_DTYPES[precision.main_gradients])
