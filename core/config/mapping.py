"""Where a model runs: degrees of both foldings of one world (contract 2), and what runs on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DispatcherName = Literal["allgather", "alltoall", "flex", "deepep", "hybridep"]
# What may be asked of a dispatcher: experts that drop (`capacity`) and are filled up (`pad`), ranks that drop (`budget`).
Limit = Literal["capacity", "pad", "budget"]
LIMITS: dict[DispatcherName, tuple[Limit, ...]] = {
    "allgather": ("capacity", "budget"),
    "alltoall": ("capacity", "pad", "budget"),
    "flex": ("capacity", "budget"),
    "deepep": ("capacity", "budget"),
    "hybridep": ("capacity", "budget"),
}
# Dispatchers that are packages of kernels: for GPUs, bfloat16, and experts that no etp cuts.
PACKAGES: tuple[DispatcherName, ...] = ("deepep", "hybridep")
ScheduleName = Literal["gpipe", "1f1b", "zero_bubble", "combined"]
ShardingName = Literal["zero1", "fsdp"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Attention folds the world as tp * cp * dp * pp, the MoE layers as etp * ep * edp * pp; dp and edp follow from the world.

    tp: ranks that cut matrices and heads of a layer; it implies sequence parallelism: between attention and MLPs every rank of tp holds
    other tokens. cp: ranks that share every sequence. pp: stages of the pipeline. ep: ranks that share the experts of a layer. etp: ranks
    that cut every expert.
    cp_alltoall: so many neighbours of cp exchange heads for sequence (all-to-all); the cp / cp_alltoall groups of them form a
    ring. 1 is a pure ring, cp a pure all-to-all.
    vpp: virtual stages per pipeline rank; a schedule interleaves them. schedule: order of forwards and backwards; combined hides the
    communication of each behind the other's computation. layout: the stage language of core/pipeline/layout.py;
    None spreads the layers evenly over pp * vpp stages.
    sharding: what of the optimizer lies apart: its states and masters (zero1), or the parameters too (fsdp). fsdp_replicas:
    with fsdp, whole copies of the shards along dp (hybrid sharding).
    dispatcher: how tokens reach their experts (core/moe/dispatch/). ep_per_node: so many neighbours of ep share a node; `flex`
    sends a token to each node once, and spreads it there. 1: every rank is a node of its own.
    expert_budget: a rank takes at most its own tokens * top_k * expert_budget rows from its ep group, in training and outside; the
    others are dropped (report section 7.1). None drops nothing.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    cp_alltoall: int = 1
    layout: str | None = None
    schedule: ScheduleName = "1f1b"
    dispatcher: DispatcherName = "alltoall"
    ep_per_node: int = 1
    expert_budget: float | None = None
    sharding: ShardingName = "zero1"
    fsdp_replicas: int = 1
