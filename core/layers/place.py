"""Where and in which form modules are built."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core.config.mapping import ParallelConfig
from core.parallel.groups import Groups


@dataclass(frozen=True, kw_only=True)
class Place:
    """This rank's groups, the mapping they follow, the dtype of parameters and the device that holds them."""

    groups: Groups
    parallel: ParallelConfig
    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> torch.Tensor:
        """An uninitialised tensor of this place."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)
