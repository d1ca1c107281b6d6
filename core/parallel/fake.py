"""Worlds that are not there: the groups of any rank by arithmetic, and a process group that moves no data.

For shapes, boxes, shares and code paths of any rank on one machine; never for numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from core.parallel.groups import Channel, Divisions, Group, Groups, divide
from core.parallel.mesh import Division, Mesh
from core.parallel.meter import Meter


@dataclass(kw_only=True)
class PlannedWorld:
    """The planned groups of every rank of a mesh, one after the other: ranks of one group share the tuple of its members.

    imagined: their collectives can be called (core/parallel/imagined.py), and count what they would send on `meter`.
    """

    divisions: Divisions
    imagined: bool = False
    meter: Meter | None = None
    known: dict[tuple[Division, int], tuple[int, ...]] = field(default_factory=dict)

    def groups(self, rank: int) -> Groups:
        """As `planned_groups`. Raises ValueError outside the world."""
        return self.divisions.assemble(partial(self._group, rank))

    def _group(self, rank: int, name: str, division: Division, channel: Channel) -> Group:
        key = division, division.first(rank)
        members = self.known.get(key)
        if members is None:
            members = self.known[key] = division.members(rank)
        return Group(
            ranks=members,
            position=bisect_left(members, rank),
            handle=None,
            axis=name,
            meter=self.meter,
            imagined=self.imagined and len(members) > 1,
        )


def plan_world(
    mesh: Mesh,
    *,
    heads: int = 1,
    ep_per_node: int = 1,
    embedding_stages: tuple[int, ...] = (0,),
    fsdp_replicas: int | None = None,
    imagined: bool = False,
    meter: Meter | None = None,
) -> PlannedWorld:
    """The planned groups of all ranks of `mesh`; options as for `make_groups`. imagined, meter: as `PlannedWorld` has them."""
    divisions = divide(
        mesh,
        heads=heads,
        ep_per_node=ep_per_node,
        embedding_stages=embedding_stages,
        fsdp_replicas=fsdp_replicas,
    )
    return PlannedWorld(divisions=divisions, imagined=imagined, meter=meter)


def planned_groups(
    mesh: Mesh,
    rank: int,
    *,
    heads: int = 1,
    ep_per_node: int = 1,
    embedding_stages: tuple[int, ...] = (0,),
    fsdp_replicas: int | None = None,
) -> Groups:
    """The groups of `rank` by arithmetic alone, for shapes and boxes ONLY: ranks and positions are those of `make_groups`, and no
    group has a handle.

    Collectives take a group without a handle for one of a single rank: over a planned group of several they would return what
    they are given, or complain about its shape. To run collectives of a rank that is not there, use `fake_world`.
    """
    world = plan_world(
        mesh,
        heads=heads,
        ep_per_node=ep_per_node,
        embedding_stages=embedding_stages,
        fsdp_replicas=fsdp_replicas,
    )
    return world.groups(rank)


@contextmanager
def fake_world(rank: int, ranks: int) -> Iterator[None]:
    """Inside, this process is `rank` of an initialised world of `ranks` whose other ranks do not exist (torch's fake backend).

    `groups_for` makes this rank's groups alone, all collectives return at once, and their results are meaningless: mostly the
    rank's own data, sometimes whatever the memory held. Raises RuntimeError where a world is initialised already.
    """
    if dist.is_initialized():
        raise RuntimeError("a fake world needs a process that is in no world yet: leave the other one first")
    dist.init_process_group(dist.Backend.FAKE, store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
