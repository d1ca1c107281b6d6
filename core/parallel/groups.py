"""Process groups made from a mesh, handed to whoever needs them; a group of one rank needs no process group at all."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from core.config.mapping import ParallelConfig
from core.parallel.mesh import Folding, Mesh, fold

# A group does not inherit the timeout of the world: left alone, torch lets a collective that nobody answers wait half an hour.
TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks that communicate over one axis, and my position among them. `handle` is None in a group of one."""

    ranks: tuple[int, ...]
    position: int
    handle: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)


@dataclass(frozen=True, kw_only=True)
class Groups:
    """One rank's groups of both foldings.

    replicas: dp * cp, the ranks that hold the same dense parameters. edp: those that hold the same experts.
    tokens: tp * cp * dp, the ranks of one pipeline stage, over which the tokens of a global batch are spread.
    """

    tp: Group
    cp: Group
    dp: Group
    pp: Group
    etp: Group
    ep: Group
    edp: Group
    replicas: Group
    tokens: Group
    world: Group


_DENSE = {"tp": ("tp",), "cp": ("cp",), "dp": ("dp",), "pp": ("pp",), "replicas": ("cp", "dp")}
_DENSE |= {"tokens": ("tp", "cp", "dp"), "world": ("tp", "cp", "dp", "pp")}
_EXPERT = {"etp": ("etp",), "ep": ("ep",), "edp": ("edp",)}


def one_rank() -> Groups:
    """The groups of a world of one rank: nothing communicates."""
    alone = Group(ranks=(0,), position=0, handle=None)
    return Groups(**{name: alone for name in (*_DENSE, *_EXPERT)})


def make_groups(mesh: Mesh, rank: int, *, timeout: timedelta = TIMEOUT) -> Groups:
    """The groups of `rank`. Every rank of the world must call it, in the same order: making a group is collective.

    timeout: how long a collective waits for the other ranks before it raises.
    """
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    mine: dict[str, Group] = {}
    for folding, names in ((mesh.dense, _DENSE), (mesh.expert, _EXPERT)):
        for name, axes in names.items():
            mine[name] = _make(folding, axes, rank, made, timeout)
    return Groups(**mine)


def groups_for(parallel: ParallelConfig, *, timeout: timedelta = TIMEOUT) -> Groups:
    """The groups of this process under `parallel`: of the initialised world, or of one rank where there is none."""
    if not dist.is_initialized():
        return one_rank()
    return make_groups(fold(parallel, dist.get_world_size()), dist.get_rank(), timeout=timeout)


def _make(
    folding: Folding,
    axes: tuple[str, ...],
    rank: int,
    made: dict[tuple[int, ...], dist.ProcessGroup],
    timeout: timedelta,
) -> Group:
    """My group over `axes`; groups with equal ranks share one process group, kept in `made` while a mesh is built."""
    found: Group | None = None
    for ranks in folding.groups(axes):
        if len(ranks) > 1 and ranks not in made:
            made[ranks] = dist.new_group(list(ranks), timeout=timeout)
        if rank in ranks:
            found = Group(ranks=ranks, position=ranks.index(rank), handle=made.get(ranks))
    assert found is not None, f"rank {rank} is in no group over {axes}"
    return found
