"""A place of one rank for modules under test."""

from __future__ import annotations

import torch

from core.config.mapping import ParallelConfig
from core.layers.place import Place
from core.parallel.groups import one_rank


def place(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Place:
    """One rank of one."""
    return Place(groups=one_rank(), parallel=ParallelConfig(), dtype=dtype, device=torch.device(device))
