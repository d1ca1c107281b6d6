"""In which formats and where an optimizer keeps what it need not keep as precisely, or as near, as what a forward uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core.config.precision import MasterName, PrecisionConfig
from core.optim.kept import BLOCK
from core.optim.moments import SCALED

_DTYPES: dict[str, torch.dtype | None] = {
    "float32": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8": torch.float8_e4m3fn,
}


@dataclass(frozen=True, kw_only=True)
class Formats:
    """moments: of Adam's two moments between steps; float16 and float8_e4m3fn under scales. gradients: of the main gradients, which
    are summed over microbatches and copies. None: the dtype of the masters, float32, or float64 for float64 parameters.

    masters: `remainder` keeps their low 16 bits beside bfloat16 parameters. on_host: the share of moments and masters that waits in host
    memory between steps. seed: of stochastic rounding. primary: weights whose products a recipe rounds are held as they are rounded.
    """

    moments: torch.dtype | None = None
    gradients: torch.dtype | None = None
    masters: MasterName = "float32"
    on_host: float = 0.0
    seed: int = 0
    primary: bool = False

    @property
    def block(self) -> int:
        """Elements that share a scale, and that the parts of ranks must not cut."""
        return BLOCK if self.moments in SCALED else 1


def formats_of(precision: PrecisionConfig, *, on_host: float = 0.0, seed: int = 0) -> Formats:
    """What a run asks for. on_host: its memory.optimizer_offload; seed: its train.seed."""
    return Formats(
        moments=_DTYPES[precision.moments],
        gradients=_DTYPES[precision.main_gradients],
        masters=precision.masters,
        on_host=on_host,
        seed=seed,
        primary=precision.primary,
    )
