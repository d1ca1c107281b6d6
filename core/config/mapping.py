"""Where a model runs: degrees of both foldings of one world (contract 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DispatcherName = Literal["allgather", "alltoall"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Attention folds the world as tp * cp * dp * pp, the MoE layers as etp * ep * edp * pp; dp and edp follow from the world."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    dispatcher: DispatcherName = "alltoall"
